/* Penstock native core: functions for Penstock's own Python package, tests and benchmarks only.
 *
 * NO STABILITY: anything here may change or go away in any release, without a new PS_ABI_VERSION.  Write programs
 * against penstock.h.  A library built with -DPENSTOCK_DEV=OFF contains none of this.
 *
 * The rules of penstock.h hold here too: statuses and messages, struct_size, ownership.
 */
#ifndef PENSTOCK_DEV_H
#define PENSTOCK_DEV_H

#include "penstock.h"
#include "penstock_ranks.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a weight lies in memory.  "rows_*" is row-major.  "t16_*" interleaves 16 output rows, so that one
 * 64-byte load feeds 16 lanes; docs/explanation/bundle-format.md gives the bytes.  Rows are padded to 16, columns to
 * the layout's step; the padding is zero. */
typedef enum ps_layout {
  PS_ROWS_F32 = 1,
  PS_ROWS_F16 = 2,
  PS_ROWS_BF16 = 3,
  PS_ROWS_I32 = 4,
  PS_ROWS_I64 = 5, /* these are for constants of general networks */
  PS_ROWS_I8 = 6,
  PS_ROWS_U8 = 7,
  PS_ROWS_BOOL = 8,
  /* clang-format off */
  PS_T16_F32 = 16,   /* [rows/16][cols][16] f32 */
  PS_T16_F16 = 17,   /* [rows/16][cols][16] f16 */
  PS_T16_BF16 = 18,  /* [rows/16][cols/2][16][2] bf16 */
  /* 19 and 20 were earlier forms of the next two (row sums; float scales of groups); they are refused */
  PS_T16_I8 = 21,    /* [rows/16]{f32 scale[16]; [cols/4][16][4] i8} */
  PS_T16_I4G32 = 22, /* [rows/16]{f32 scale[16]; [cols/64]{[16]{u8 step0; i8 offset0; u8 step1; i8 offset1};
                        u8 [2][4][16][4]: low nibble k=32g+4j+i, high k=32g+16+4j+i}}:
                        scale * i8(step * nibble + offset) */
  /* The block types of GGUF, whose values stay exact.  Columns are a multiple of 32, for the K types of 256. */
  PS_T16_Q8_0 = 23, /* [rows/16][cols/64]{f16 d[2][16]; i8 [2][8][16][4]}: d * q */
  PS_T16_Q4_0 = 24, /* [rows/16][cols/64]{f16 d[2][16]; u8 [2][4][16][4] as of t16_i4g32}: d * (nibble - 8) */
  PS_T16_Q4_K = 25, /* [rows/16][cols/256]{f16 d[16], dmin[16]; [4]{[16]{u8 s0, m0, s1, m1}; u8 [2][4][16][4]}}:
                       d*s*q - dmin*m */
  PS_T16_Q5_K = 26, /* as t16_q4_k, and after the nibbles of 64 columns u8 [2][16][4]: bit j of byte i is bit 4 of
                       column 32g+4j+i, bit 4+j of 32g+16+4j+i */
  PS_T16_Q6_K = 27, /* [rows/16][cols/256]{f16 d[16]; 32 zero bytes; [4]{i8 s[16][4], of 16 columns each;
                       u8 [2][4][16][4]; u8 [2][2][16][4]: bits 2j of byte i are bits 4 of column 32g+16h+4j+i}}:
                       d * s * (q - 32) */
  PS_T16_MXFP4 = 28, /* [rows/16][cols/128]{u8 e[16][4], of 32 columns each; u8 [4][4][16][4] as of t16_i4g32}:
                       2^(e-128) * {0, 1, 2, 3, 4, 6, 8, 12, and these negated}[nibble], e from 2 to 252 */
  PS_T16_UINT4 = 29, /* no type of GGUF, but packed as its blocks are. [rows/16][cols/128]{f16 d[4][16]; u8 zero[16][4];
                        u8 [4][4][16][4] as of t16_i4g32}: d * (nibble - zero), zero from 0 to 16 */
  PS_T16_Q4_1 = 30, /* [rows/16][cols/64]{f16 d[2][16]; f16 m[2][16]; u8 [2][4][16][4] as of t16_i4g32}:
                       d * nibble + m */
  PS_T16_Q5_0 = 31, /* [rows/16][cols/64]{f16 d[2][16]; u8 [2][4][16][4]; u8 [2][16][4]: fifth bits as of t16_q5_k}:
                       d * (q - 16) */
  PS_T16_Q5_1 = 32, /* [rows/16][cols/64]{f16 d[2][16]; f16 m[2][16]; then as t16_q5_0}: d * q + m */
  PS_T16_IQ4_NL = 33, /* as t16_q4_0:
                         d * {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}[nibble] */
  PS_T16_IQ4_XS = 34, /* [rows/16][cols/256]{f16 d[16]; 32 zero bytes; i8 s[2][16][4], of 32 columns each, from -32 to
                         31; u8 [8][4][16][4] as of t16_i4g32}: d * s * value of t16_iq4_nl */
  PS_T16_Q2_K = 35, /* [rows/16][cols/256]{f16 d[16], dmin[16]; u8 [4][16][4], of 16 columns each: s in the low half, m
                       in the high; [8]{u8 [2][16][4]: bits 2j of byte i are q of column 32g+16h+4j+i}}: d*s*q - dmin*m */
  PS_T16_Q3_K = 36, /* [rows/16][cols/256]{f16 d[16]; 32 zero bytes; i8 s[4][16][4], of 16 columns each, from -32 to 31;
                      [8]{u8 [2][16][4] as of t16_q2_k; u8 [16][4]: bit j of byte i is bit 2 of column 32g+4j+i, bit 4+j
                      of 32g+16+4j+i}}: d * s * (q - 4) */
  PS_T16_NVFP4 = 37, /* [rows/16][cols/256]{f32 d[16]; e4m3 s[4][16][4], of 16 columns each; u8 [8][4][16][4] as of
                        t16_i4g32}: (d * s) * v / 2, v as of t16_mxfp4 */
  PS_T16_TQ2_0 = 38, /* [rows/16][cols/256]{f32 d[16]; [8]{u8 [2][16][4] as of t16_q2_k}}: d * (q - 1) */
  PS_T16_TQ1_0 = 39, /* [rows/16][cols/256]{f32 d[16]; u8 [16][4]: bits 2i of byte p are q of column 64p+60+i;
                        [4]{i8 [3][16][4]: five of three values a byte, docs/explanation/bundle-format.md}}:
                        d * (q - 1) */
  PS_T16_Q2_0 = 40,  /* [rows/16][cols/128]{f16 d[2][16], of 64 columns each; [4]{u8 [2][16][4] as of t16_q2_k}}:
                        d * (q - 1) */
  PS_T16_Q1_0 = 41   /* [rows/16][cols/256]{f16 d[2][16], of 128 columns each; [8]{u8 [16][4]: bit j of byte i is that
                        of column 32g+4j+i}}: d if the bit is set, else -d */
  /* clang-format on */
} ps_layout;

/* The layout of a recurrent state in ps_op_run: each page is head_dim float32 numbers of each head. */
#define PS_STATE_F32 16

/* ---- instruction levels --------------------------------------------------------------------------------- */
/* The levels compiled in, best first; `runnable` tells whether this machine can execute the level.  Null past the
 * end. */
PS_API const char* ps_cpu_level_at(int32_t index, int32_t* runnable);

/* ---- programs with flags ---------------------------------------------------------------------------------- */
#define PS_PROGRAM_EMPTY_KERNELS 1u /* run everything except the kernels, to measure the executor */
#define PS_PROGRAM_POISON 2u        /* fill temporaries with NaN before each step, to find aliasing errors */
/* Use every thread in every step, even if the step is short or threads are late: for tests and measurements. */
#define PS_PROGRAM_ALL_THREADS 4u
#define PS_PROGRAM_INPUT_SUMS 8u /* ps_program_sum_inputs may be called */
/* ps_program_create with these flags, or-ed.  Only this function takes them, a resize keeps them, and they do not
 * change the plan. options->flags must be 0 here too. */
PS_API ps_status ps_program_create_flagged(ps_model* model, ps_context* context, const ps_program_options* options,
                                           uint32_t flags, ps_program** out);

/* ---- for Python, so that it does not repeat the core's rules ------------------------------------------------- */
/* Identifies the open file: device, inode, bytes, and time of the last change in nanoseconds, all as they were when the
 * model was opened. */
PS_API ps_status ps_model_file(const ps_model* model, int64_t out[4]);
/* The default ps_kv_layout of programs of a scheme. */
PS_API int32_t ps_auto_kv_layout(const char* scheme);

/* ---- tokenizers ------------------------------------------------------------------------------------------ */
/* Opens the segment tokenizer.bin in the caller's memory, 8-byte aligned, which must outlive the tokenizer. */
PS_API ps_status ps_tokenizer_open_data(const void* data, int64_t bytes, ps_tokenizer** out);
/* The bytes that each token decodes to, which may be parts of characters: token i is bytes begins[i] to begins[i + 1]
 * of text, and special if bit 0 of flags[i] is set.  Everything lies in the tokenizer's memory: num_tokens + 1 begins
 * and num_tokens flags. */
PS_API ps_status ps_tokenizer_tokens(const ps_tokenizer* tokenizer, const uint32_t** begins, const uint8_t** text,
                                     int64_t* text_bytes, const uint8_t** flags, int32_t* num_tokens);

/* ---- KV pages ------------------------------------------------------------------------------------------- */
/* KV pages of one state as raw bytes, for tests, debugging and page transfer. num_pages: pages of its page group. */
PS_API ps_status ps_program_kv(ps_program* program, int32_t state, void** data, int64_t* page_bytes,
                               int32_t* num_pages);

/* ---- where a step's time goes --------------------------------------------------------------------------- */
/* A phase of a node on one thread, in nanoseconds of CLOCK_MONOTONIC: the thread arrives, waits for the others if the
 * phase needs them, begins and ends. */
typedef struct ps_span {
  int32_t node; /* -1: the whole step, on thread 0 */
  int32_t phase, thread, reserved;
  int64_t arrive_ns, begin_ns, end_ns;
} ps_span;
/* 1: every later run records its spans, which costs a few percent. 0: no run does, as in a new program. */
PS_API ps_status ps_program_profile(ps_program* program, int32_t on);
/* The last run's spans: first the whole step, then thread by thread in order of time.  In the program's memory until
 * the next run; none before a run that recorded them. */
PS_API ps_status ps_program_profile_spans(const ps_program* program, const ps_span** spans, int64_t* count);

/* ---- input statistics of linears, for calibrated quantization ------------------------------------------------- */
/* From the next run on, the linear that is node `index` of the graph adds x^2 of each column of its input to squares
 * [cols], raises maxima [cols] to the largest |x|, and copies the input of the last run to rows [tokens][cols]; null:
 * off.  The memory belongs to the caller and must outlive the program or the next call for this node.  The sums do not
 * depend on the number of threads.  The program needs PS_PROGRAM_INPUT_SUMS; others have no overhead.  In a step that
 * wants few logits, nodes with ps_node_info.kept see only those tokens, unless the batch has PS_BATCH_HIDDEN.  An
 * expert_linear has sums for each expert, squares and maxima [experts][cols], over the rows that were routed to it, and
 * copies the expert ids to experts [tokens][k].  Its rows are [tokens][cols], or [tokens][k][cols] if each expert of a
 * token has an input of its own. */
PS_API ps_status ps_program_sum_inputs(ps_program* program, int32_t index, double* squares, float* maxima, float* rows,
                                       int32_t* experts);

typedef struct ps_dim { /* factor * size + offset */
  int32_t symbol;       /* size: 0 num_tokens, 1 num_requests, 2 page_table_width, 3 num_rows; -1: only offset */
  int32_t reserved;
  int64_t factor, offset;
} ps_dim;
typedef struct ps_node_info {
  uint32_t struct_size;
  int32_t output_rank;            /* of its first output; 0: it has none */
  const char *op, *name, *output; /* valid until the model closes; "" for no output */
  const char* scheme;             /* of a linear, else "" */
  ps_dim output_dims[6];
  int64_t weight_bytes;                   /* that one step reads; of an embedding table one row */
  int64_t rows, cols;                     /* of its first weight */
  int32_t layout;                         /* ps_layout of its first weight; 0: it has none */
  int32_t num_kv_heads, head_dim, window; /* of its state; 0 without one */
  int32_t kept; /* 1: in a step that wants the logits of at most half of its tokens, each once and in order, and does
                   not have PS_BATCH_HIDDEN, the node computes only the rows of those tokens */
} ps_node_info;
PS_API ps_status ps_model_node(const ps_model* model, int32_t index, ps_node_info* out);

/* ---- single ops and weights: eager mode, packing, tests ------------------------------------------------ */
typedef struct ps_tensor {
  void* data;    /* null: an absent optional argument */
  int32_t dtype; /* ps_dtype; ignored for a weight, whose layout determines it */
  int32_t ndim;
  int64_t dims[6];
  int64_t row_stride; /* elements between rows of the first dimension; the rest is contiguous */
  int32_t layout;     /* weights [rows, cols]: ps_layout; KV states [pages, kv heads, head_dim]: ps_kv_layout, or
                         PS_STATE_F32; else 0 */
} ps_tensor;
typedef struct ps_attr {
  const char* name;
  int32_t type; /* 1: int, 2: float, 3: string */
  int64_t i;
  double f;
  const char* s;
} ps_attr;
/* Runs one op of the table.  The tensors are the schema's arguments in order, then its outputs, which the caller
 * allocates.  The shapes are inferred and compared. */
PS_API ps_status ps_op_run(ps_context* context, const char* op, const ps_tensor* tensors, int32_t num_tensors,
                           const ps_attr* attrs, int32_t num_attrs);
/* "name.version schema" of the index-th op; null past the end. */
PS_API const char* ps_op_schema(int32_t index);

/* Samples from logits that do not belong to a program (eager mode). */
PS_API ps_status ps_sample(ps_context* context, const float* logits, int32_t vocab, const ps_sampling* sampling,
                           const ps_sampled* out);

PS_API ps_status ps_layout_bytes(int32_t layout, int64_t rows, int64_t cols, int64_t* bytes);
/* Packs num_rows source rows (row-major, cols wide, dtype F32/F16/BF16) as rows row_start... of a weight of rows x cols
 * at dst, which must be zero before the first call.  Quantizing layouts round to nearest; docs/guides/quantization.md
 * says how the scale of a row and the step and offset of a group (i4) are chosen.  Calls on disjoint whole tiles may
 * run in parallel. */
PS_API ps_status ps_pack(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                         int64_t num_rows, int32_t src_dtype, const void* src, void* dst);
/* Like ps_pack, from f32 into i4g32.  The search for a group's step and offset weights the squared error of column i by
 * column_weights[i] (null, or 0 for a whole group: all equal) and tries more candidates. scales [num_rows]: the scales
 * of the rows, whose values beyond 127 times the scale are clipped; null: the largest magnitude becomes 127.
 * even_offsets 1: offsets are even numbers from -126 to 0, which GGUF's Q4_K can hold; 0: any int8. */
PS_API ps_status ps_pack_weighted(ps_context* context, int64_t rows, int64_t cols, int64_t row_start, int64_t num_rows,
                                  const float* src, const float* column_weights, const float* scales,
                                  int32_t even_offsets, void* dst);
/* Packs values that are already quantized: scales f32 [num_rows]; i8: q [num_rows][cols] -128..127, groups null; i4g32:
 * q [num_rows][cols] 0..15, groups [num_rows][ceil(cols/32)][2]: step, 1..17, and offset, such that every step * q +
 * offset is an int8.  Exact inverse of ps_unpack_quantized. */
PS_API ps_status ps_pack_quantized(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                                   int64_t num_rows, const int8_t* q, const float* scales, const int8_t* groups,
                                   void* dst);
PS_API ps_status ps_unpack_quantized(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                                     int64_t num_rows, const void* src, int8_t* q, float* scales, int8_t* groups);
/* Packs rows of blocks as a GGUF file stores them: for t16_q8_0 blocks of type Q8_0, and so on. dst is as for
 * ps_pack. */
PS_API ps_status ps_pack_blocks(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                                int64_t num_rows, const void* src, void* dst);
/* The values that the kernels compute with, as f32 [num_rows][cols]. */
PS_API ps_status ps_unpack(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                           int64_t num_rows, const void* src, float* dst);

/* ---- the machine's limits, for benchmarks --------------------------------------------------------------- */
/* Read bandwidth in bytes per second of the context's threads from a private buffer: the best of several passes. */
PS_API ps_status ps_probe_bandwidth(ps_context* context, int64_t buffer_bytes, int32_t passes,
                                    double* bytes_per_second);
/* Operations per second in registers (a multiply-add counts as two): dtype PS_F32, PS_BF16 or PS_I8. */
PS_API ps_status ps_probe_compute(ps_context* context, int32_t dtype, double seconds, double* ops_per_second);
/* Time in nanoseconds of each of `count` exchanges in which every rank sends `bytes`, copies included.  All ranks call
 * this with the same arguments. */
PS_API ps_status ps_probe_gather(const ps_comm* comm, int64_t bytes, int32_t count, int64_t* nanoseconds);

PS_API uint32_t ps_crc32(uint32_t crc, const void* data, int64_t bytes); /* zlib's CRC-32 */

#ifdef __cplusplus
}
#endif
#endif /* PENSTOCK_DEV_H */
