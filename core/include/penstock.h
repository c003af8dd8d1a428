/* Penstock native core: the C ABI.
 *
 * Every function is safe to call from any thread unless it says otherwise; a program is used by one
 * thread at a time.  Functions that can fail return a ps_status; ps_error_message() then says, for the
 * calling thread, what was expected and what was found.  No exception crosses this boundary.
 * Structs that may grow begin with struct_size, which the caller sets to sizeof(the struct); a field
 * that the caller's struct does not have yet counts as zero, and zero is always a sound default.
 */
#ifndef PENSTOCK_H
#define PENSTOCK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PS_API __attribute__((visibility("default")))
#define PS_ABI_VERSION 2
#define PS_PAGE_TOKENS 32 /* tokens in one KV page */

typedef enum ps_status {
  PS_OK = 0,
  PS_INVALID_ARGUMENT = 1, /* the caller's mistake: the message names the field */
  PS_INVALID_FILE = 2,     /* the bundle is damaged or hostile: the message names file and field */
  PS_UNSUPPORTED = 3,      /* a sound request that this build cannot serve: the message names it */
  PS_OUT_OF_MEMORY = 4,
  PS_IO_ERROR = 5,
  PS_INTERNAL = 6
} ps_status;

typedef enum ps_dtype {
  PS_F32 = 1, PS_F16 = 2, PS_BF16 = 3, PS_I8 = 4, PS_I32 = 5, PS_U8 = 6, PS_I64 = 7
} ps_dtype;

/* How a weight lies in memory.  "rows_*" is row-major.  "t16_*" interleaves 16 output rows, so that one
 * 64-byte load feeds 16 lanes; docs/bundle-format.md gives the bytes.  Rows are padded to 16, columns to
 * the layout's step; the padding is zero. */
typedef enum ps_layout {
  PS_ROWS_F32 = 1, PS_ROWS_F16 = 2, PS_ROWS_BF16 = 3, PS_ROWS_I32 = 4,
  PS_T16_F32 = 16,   /* [rows/16][cols][16] f32 */
  PS_T16_F16 = 17,   /* [rows/16][cols][16] f16 */
  PS_T16_BF16 = 18,  /* [rows/16][cols/2][16][2] bf16 */
  /* 19 and 20 were these two with row sums and with float scales of groups: refused */
  PS_T16_I8 = 21,    /* [rows/16]{f32 scale[16]; [cols/4][16][4] i8} */
  PS_T16_I4G32 = 22  /* [rows/16]{f32 scale[16]; [cols/64]{[16]{u8 step0; i8 offset0; u8 step1; i8 offset1};
                        u8 [2][4][16][4]: low nibble k=32g+4j+i, high k=32g+16+4j+i}}: scale * i8(step * nibble + offset) */
} ps_layout;

typedef enum ps_kv_layout { PS_KV_F32 = 1, PS_KV_BF16 = 2, PS_KV_INT8 = 3 } ps_kv_layout;

typedef struct ps_context ps_context; /* instruction level and thread pool */
typedef struct ps_model ps_model;     /* an opened, validated bundle */
typedef struct ps_program ps_program; /* a model with its memory: temporaries, KV pages, logits */

/* ---- errors, version -------------------------------------------------------------------------------- */
PS_API const char* ps_error_message(void); /* of this thread's last failed call; never null */
PS_API const char* ps_version(void);
PS_API int32_t ps_abi_version(void);

/* ---- context ---------------------------------------------------------------------------------------- */
typedef struct ps_context_options {
  uint32_t struct_size;
  int32_t num_threads;   /* 0: as many as the affinity mask and the cgroup allow */
  const char* cpu_level; /* null: PENSTOCK_CPU, else the best; "generic" | "avx2" | "avx512" | "neon" */
} ps_context_options;
PS_API ps_status ps_context_create(const ps_context_options* options, ps_context** out);
PS_API void ps_context_destroy(ps_context* context);
PS_API int32_t ps_context_num_threads(const ps_context* context);
PS_API const char* ps_context_cpu_level(const ps_context* context);
/* Levels compiled in, best first; runnable says whether this machine can execute it.  Null past the end. */
PS_API const char* ps_cpu_level_at(int32_t index, int32_t* runnable);

/* ---- model ------------------------------------------------------------------------------------------ */
typedef struct ps_model_options {
  uint32_t struct_size;
  int32_t verify;  /* 1: also check the checksum of every segment */
  int32_t no_mmap; /* 1: read the file into private memory instead of mapping it */
} ps_model_options;
PS_API ps_status ps_model_open(const char* path, const ps_model_options* options, ps_model** out);
/* Copies the weights from the mapped file into private memory with transparent huge pages (ordinary ones where the system
 * grants none), read by the context's threads; the file's page cache is dropped behind, so that memory holds the weights
 * once.  The caller has seen that there is memory for ps_model_info.weight_bytes and a little more.  Programs made
 * afterwards read the copy.  Not beside another call with this model.  A file that shrank or changed since it was opened
 * is PS_INVALID_FILE, and the model stays as it was.  Does nothing the second time, or with no_mmap. */
PS_API ps_status ps_model_populate(ps_model* model, ps_context* context);
PS_API void ps_model_close(ps_model* model);

typedef struct ps_model_info {
  uint32_t struct_size;
  int32_t vocab_size, context_len, num_states, num_page_groups, num_weights, num_nodes;
  int64_t weight_bytes, file_bytes;
  int64_t weight_bytes_per_token; /* bytes of weights that one decoded token at batch 1 reads */
  const char *network, *scheme;   /* valid until the model closes */
  const int32_t* page_windows;    /* [num_page_groups]; 0: every position is kept */
  int32_t hidden_size;            /* width of ps_program_hidden's rows; 0: the graph has none */
  int32_t tail_k;                 /* ids of ps_program_tail's rows; 0: the graph ends in logits */
  const char* tail;               /* "argmax" or "topk", with which the graph ends; "": with logits */
} ps_model_info;
PS_API ps_status ps_model_describe(const ps_model* model, ps_model_info* out);
/* A segment by name ("tokenizer.json", "config.json" ...): a view into the model, valid until it closes.
 * Without one of that name data is null and bytes is -1. */
PS_API ps_status ps_model_segment(const ps_model* model, const char* name, const void** data, int64_t* bytes);

/* ---- program ---------------------------------------------------------------------------------------- */
#define PS_PROGRAM_EMPTY_KERNELS 1u /* run everything but the kernels: measures the executor alone */
#define PS_PROGRAM_POISON 2u        /* fill temporaries with NaN before each step: finds aliasing mistakes */
#define PS_PROGRAM_ALL_THREADS 4u   /* every thread for every step, however short, few the cores or late the threads:
                                       for tests and measurements */

typedef struct ps_program_options {
  uint32_t struct_size;
  int32_t max_tokens;   /* tokens in one step */
  int32_t max_requests; /* requests in one step */
  int32_t max_rows;     /* rows of logits in one step */
  int32_t num_pages;    /* KV pages per page group */
  int32_t num_slots;    /* slots that remember the token last sampled */
  int32_t kv_layout;    /* ps_kv_layout; 0: PS_KV_F32 */
  uint32_t flags;
} ps_program_options;

typedef struct ps_plan {
  uint32_t struct_size;
  int64_t weight_bytes, temporary_bytes, scratch_bytes, kv_bytes, logits_bytes, total_bytes;
  int64_t kv_page_bytes; /* bytes of one page over all states */
} ps_plan;
/* The memory a program of these limits would take; allocates nothing. */
PS_API ps_status ps_program_plan(const ps_model* model, const ps_context* context,
                                 const ps_program_options* options, ps_plan* out);
PS_API ps_status ps_program_create(ps_model* model, ps_context* context,
                                   const ps_program_options* options, ps_program** out);
PS_API void ps_program_destroy(ps_program* program); /* before its model and context */

#define PS_BATCH_HIDDEN 1u /* ps_program_hidden will be called: else rows that no logits are made of may be left out */

/* One step: num_tokens tokens of num_requests requests, flat. */
typedef struct ps_batch {
  uint32_t struct_size;
  int32_t num_tokens, num_requests, num_rows, page_table_width;
  const int32_t* token_ids;      /* [num_tokens]; -1-s: the token last sampled in slot s */
  const int32_t* positions;      /* [num_tokens]; ascending by one within a request */
  const int32_t* request_starts; /* [num_requests+1]; first 0, last num_tokens, strictly ascending */
  const int32_t* page_tables;    /* [num_page_groups][num_requests][page_table_width]; -1: freed or unused */
  const int32_t* output_rows;    /* [num_rows]; indices of tokens whose logits are wanted */
  uint32_t flags;
} ps_batch;

/* How to sample: arrays of one entry a row.  The order of processing is that of docs/numerics.md. */
typedef struct ps_sampling {
  uint32_t struct_size;
  int32_t num_rows;         /* the last step's */
  const float* temperature; /* 0: greedy */
  const int32_t* top_k;     /* 0: off */
  const float* top_p;       /* 1: off */
  const uint64_t* seed;
  const int64_t* counter;   /* [num_rows][2]: sample index, position of the token to be sampled */
  const int32_t* slot;      /* or null; where to remember the token, -1: nowhere */
  const uint32_t* mask;     /* [num_rows][(vocab+31)/32] or null; bit set: token allowed */
  const float* min_p;       /* or null; 0: off */
  const float* typical_p;   /* or null; 1: off */
  const float* repetition_penalty; /* or null; 1: off; of the tokens in a row's history */
  const float* presence_penalty;   /* or null; 0: off; of the history's tokens behind the prompt */
  const float* frequency_penalty;  /* or null; 0: off; of the history's tokens behind the prompt */
  const int32_t* history_starts;   /* [num_rows+1] or null: where each row's history begins, from 0 */
  const int32_t* prompt_lens;      /* how many of a row's history are the prompt's */
  const int32_t* history;          /* token ids, the prompt's first; -1-s: the token last sampled in slot s */
  const int32_t* bias_starts;      /* [num_rows+1] or null: where each row's biases begin, from 0 */
  const int32_t* bias_ids;         /* tokens */
  const float* bias;               /* added to their logits; minus infinity forbids one */
  const int32_t* target;           /* or null; the token to score instead of sampling one, -1: sample */
  const int32_t* num_logprobs;     /* or null: 0; how many of the likeliest tokens to list, -1: no log-probability */
} ps_sampling;

typedef enum ps_row_status {
  PS_ROW_OK = 0,
  PS_ROW_NOT_FINITE = 1, /* the row's logits hold a NaN or an infinity */
  PS_ROW_MASKED = 2      /* no token is allowed */
} ps_row_status;

/* What sampling makes.  Log-probabilities are those of the logits as the graph made them, before any bias, penalty or
 * temperature.  A row that failed has the id -1; without row_status the call fails instead. */
typedef struct ps_sampled {
  uint32_t struct_size;
  int32_t num_top;     /* columns of the lists of likeliest tokens; 0: none */
  int32_t* ids;        /* [num_rows] */
  float* logprobs;     /* [num_rows] or null; NaN where none was asked for */
  int32_t* ranks;      /* [num_rows] or null; 1: the likeliest token; of equals the smaller id is ahead */
  int32_t* row_status; /* [num_rows] or null: ps_row_status */
  int32_t* top_ids;    /* [num_rows][num_top], likeliest first; -1 behind the row's num_logprobs */
  float* top_logprobs; /* [num_rows][num_top] */
} ps_sampled;

PS_API ps_status ps_program_run(ps_program* program, const ps_batch* batch);
PS_API ps_status ps_program_sample(ps_program* program, const ps_sampling* sampling, const ps_sampled* out);
PS_API ps_status ps_program_step(ps_program* program, const ps_batch* batch, const ps_sampling* sampling,
                                 const ps_sampled* out);
/* The last step's logits, [num_rows][vocab] f32, in the program's memory until the next run. */
PS_API ps_status ps_program_logits(const ps_program* program, const float** logits, int32_t* num_rows, int32_t* vocab);
/* The last step's hidden rows, [num_tokens][width] f32, that its output rows were picked from: of a language model those
 * of the last norm.  In the program's memory until the next run, of a step with PS_BATCH_HIDDEN.  PS_UNSUPPORTED for a
 * graph that picks them otherwise. */
PS_API ps_status ps_program_hidden(const ps_program* program, const float** hidden, int32_t* num_tokens, int32_t* width);
/* Of a graph that ends in argmax or topk, the last step's ids [num_rows][k], best first, and of topk their logits [num_rows][k],
 * else null.  In the program's memory until the next run.  Such a graph is sampled greedily and has no logits beside. */
PS_API ps_status ps_program_tail(const ps_program* program, const int32_t** ids, const float** values, int32_t* num_rows,
                                 int32_t* k);
/* KV pages of one state as raw bytes: for tests, debugging and page transfer. */
PS_API ps_status ps_program_kv(ps_program* program, int32_t state, void** data, int64_t* page_bytes);

/* ---- where a step's time goes --------------------------------------------------------------------------- */
/* A phase of a node on one thread, in nanoseconds of CLOCK_MONOTONIC: it arrives, waits for the others where the
 * phase needs them, begins and ends. */
typedef struct ps_span {
  int32_t node; /* -1: the whole step, on thread 0 */
  int32_t phase, thread, reserved;
  int64_t arrive_ns, begin_ns, end_ns;
} ps_span;
/* 1: every later run notes its spans, which costs it some percent.  0: none does, which is how programs begin. */
PS_API ps_status ps_program_profile(ps_program* program, int32_t on);
/* The last run's spans: the whole step, then thread by thread in order of time.  In the program's memory until the
 * next run; none before a run that noted them. */
PS_API ps_status ps_program_profile_spans(const ps_program* program, const ps_span** spans, int64_t* count);

typedef struct ps_dim { /* factor * size + offset */
  int32_t symbol;       /* size: 0 num_tokens, 1 num_requests, 2 page_table_width, 3 num_rows; -1: offset alone */
  int32_t reserved;
  int64_t factor, offset;
} ps_dim;
typedef struct ps_node_info {
  uint32_t struct_size;
  int32_t output_rank;              /* of its first output; 0: it has none */
  const char *op, *name, *output;   /* valid until the model closes; "" for no output */
  const char* scheme;               /* of a linear, else "" */
  ps_dim output_dims[4];
  int64_t weight_bytes;             /* that one step reads; of a table one row */
  int64_t rows, cols;               /* of its first weight */
  int32_t layout;                   /* ps_layout of its first weight; 0: it has none */
  int32_t num_kv_heads, head_dim, window; /* of its state; 0 without one */
  int32_t kept; /* 1: where a step wants the logits of half its tokens at most, each once and in order, and does not have
                   PS_BATCH_HIDDEN, the node runs over the wanted tokens alone */
} ps_node_info;
PS_API ps_status ps_model_node(const ps_model* model, int32_t index, ps_node_info* out);

/* ---- single ops and weights: eager mode, packing, tests ------------------------------------------------ */
typedef struct ps_tensor {
  void* data; /* null: an absent optional argument */
  int32_t dtype;      /* ps_dtype; for a weight the dtype of its layout's elements is ignored */
  int32_t ndim;
  int64_t dims[4];
  int64_t row_stride; /* elements between rows of the first dimension; the rest is contiguous */
  int32_t layout;     /* weights [rows, cols]: ps_layout; KV states [pages, kv heads, head_dim]: ps_kv_layout; else 0 */
} ps_tensor;
typedef struct ps_attr {
  const char* name;
  int32_t type; /* 1: int, 2: float, 3: string */
  int64_t i;
  double f;
  const char* s;
} ps_attr;
/* Runs one op of the table: tensors are the schema's arguments in order, then its outputs, allocated by the
 * caller.  Shapes are inferred again and compared. */
PS_API ps_status ps_op_run(ps_context* context, const char* op, const ps_tensor* tensors, int32_t num_tensors,
                           const ps_attr* attrs, int32_t num_attrs);
/* "name.version schema" of the index-th op; null past the end. */
PS_API const char* ps_op_schema(int32_t index);

/* Sampling over logits that do not belong to a program (eager mode). */
PS_API ps_status ps_sample(ps_context* context, const float* logits, int32_t vocab, const ps_sampling* sampling,
                           const ps_sampled* out);

PS_API ps_status ps_layout_bytes(int32_t layout, int64_t rows, int64_t cols, int64_t* bytes);
/* Packs num_rows source rows (row-major, cols wide, dtype F32/F16/BF16) as rows row_start... of a weight of
 * rows x cols whose memory is dst, zeroed before the first call.  Quantizing layouts round to nearest; the scale
 * of a row and the line of a group (i4) are chosen as docs/quantization.md says.  Calls on disjoint whole tiles
 * may run side by side. */
PS_API ps_status ps_pack(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start, int64_t num_rows,
                         int32_t src_dtype, const void* src, void* dst);
/* Packs values that are quantized already: scales f32 [num_rows]; i8: q [num_rows][cols] -127..127, groups null;
 * i4g32: q [num_rows][cols] 0..15, groups [num_rows][ceil(cols/32)][2]: step, 1..17, and offset, such that every
 * step * q + offset is an int8.  Exact inverse of ps_unpack_quantized. */
PS_API ps_status ps_pack_quantized(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                                   int64_t num_rows, const int8_t* q, const float* scales, const int8_t* groups, void* dst);
PS_API ps_status ps_unpack_quantized(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                                     int64_t num_rows, const void* src, int8_t* q, float* scales, int8_t* groups);
/* The values a kernel computes with, as f32 [num_rows][cols]. */
PS_API ps_status ps_unpack(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start, int64_t num_rows,
                           const void* src, float* dst);

/* ---- the machine's limits, for benchmarks --------------------------------------------------------------- */
/* Bytes a second read by the context's threads from a private buffer: the best of several passes. */
PS_API ps_status ps_probe_bandwidth(ps_context* context, int64_t buffer_bytes, int32_t passes, double* bytes_per_second);
/* Operations a second (multiply and add count two) in registers: dtype PS_F32, PS_BF16 or PS_I8. */
PS_API ps_status ps_probe_compute(ps_context* context, int32_t dtype, double seconds, double* ops_per_second);

PS_API uint32_t ps_crc32(uint32_t crc, const void* data, int64_t bytes); /* zlib's CRC-32 */

#ifdef __cplusplus
}
#endif
#endif /* PENSTOCK_H */
