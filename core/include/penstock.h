/* Penstock native core: the C API.  Open a bundle, plan its memory, run steps, sample tokens; C99 and C++.
 *
 *   ps_context_create -> ps_model_open -> ps_program_create -> ps_program_step ... -> destroy, close
 *
 * A bundle of a general network is run with ps_program_predict instead: arrays in, arrays out.
 *
 * examples/c/generate.c is a whole program; docs/guides/devices.md says how to build, shrink and link the library.
 *
 * Errors.  A function that can fail returns a ps_status; ps_error_message() then says, for the calling thread, which
 * argument or field, what was expected and what was found.  What such a function writes to is left as it was, or null.
 * No exception crosses this boundary and nothing is printed.
 *
 * Ownership.  Handles (ps_context, ps_model, ps_program, ps_tokenizer) belong to whoever made them and are given back
 * by their destroy or close function, which takes null.  They may be given back in any order: a program keeps the model
 * and the context that it was made of, and a tokenizer its model.  A handle is no address and never comes again: every
 * function refuses one that was given back, and any pointer that is none.  Arguments are read only during the call,
 * strings and arrays too: the caller keeps them.  Views (segments, logits ...) point into the handle's memory and end
 * as each says.
 *
 * Threads.  Every function may be called from any thread.  A program serves one call at a time: a second one from
 * another thread while the first is inside is refused.  A handle is given back when no other thread is inside a call
 * with it or about to make one: nothing guards a context, a model or a tokenizer against that, and a program only
 * against calls that are inside already.  Programs that share a context take turns inside a step.  In a forked child a
 * context's threads do not exist: steps are refused there; make a context in the child.
 *
 * Floating point.  Functions that compute do so in their own environment: they round to nearest, keep subnormal
 * numbers and mask all exceptions, whatever the calling thread has set.  Its registers are the same again on return.
 *
 * Growing structs begin with struct_size, which the caller sets to sizeof(the struct); a field that the caller's struct
 * does not have yet counts as zero, and zero is always a sound default.  Fields of a newer header that the library does
 * not know must be zero: else PS_UNSUPPORTED names the struct; in what the library fills they become zero.
 *
 * Versions.  PS_ABI_VERSION grows when a program has to be compiled again; the shared library's soname carries it.
 * PS_VERSION is the release: within 1.x functions and fields are added, never changed (0.x may change with the minor).
 */
#ifndef PENSTOCK_H
#define PENSTOCK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PS_API __attribute__((visibility("default")))
#define PS_ABI_VERSION 3
#define PS_VERSION "0.1.0"
#define PS_PAGE_TOKENS 32 /* tokens in one KV page */

typedef enum ps_status {
  PS_OK = 0,
  PS_INVALID_ARGUMENT = 1, /* the caller's mistake: the message names the field */
  PS_INVALID_FILE = 2,     /* the bundle is damaged or hostile: the message names file and field */
  PS_UNSUPPORTED = 3,      /* a sound request that this build cannot serve: the message names it */
  PS_OUT_OF_MEMORY = 4,
  PS_IO_ERROR = 5,
  PS_INTERNAL = 6,
  PS_ABORTED = 7 /* ranks: the group was ended, by a rank that failed or by its owner: nothing of it runs again */
} ps_status;

typedef enum ps_dtype {
  PS_F32 = 1,
  PS_F16 = 2,
  PS_BF16 = 3,
  PS_I8 = 4,
  PS_I32 = 5,
  PS_U8 = 6,
  PS_I64 = 7,
  PS_BOOL = 8
} ps_dtype;

/* How keys and values lie in their pages: exact, or smaller and faster (docs/explanation/numerics.md). */
typedef enum ps_kv_layout { PS_KV_F32 = 1, PS_KV_BF16 = 2, PS_KV_INT8 = 3 } ps_kv_layout;

typedef struct ps_context ps_context; /* instruction level and thread pool */
typedef struct ps_model ps_model;     /* an opened, validated bundle */
typedef struct ps_program ps_program; /* a model with its memory: temporaries, KV pages, logits */

/* ---- errors, version -------------------------------------------------------------------------------- */
/* Of this thread's last failed call, "no error" before one; never null.  Valid until the thread's next failure. */
PS_API const char* ps_error_message(void);
PS_API const char* ps_version(void); /* the library's PS_VERSION */
PS_API int32_t ps_abi_version(void); /* the library's PS_ABI_VERSION */

/* ---- context: threads and instruction level --------------------------------------------------------- */
typedef struct ps_context_options {
  uint32_t struct_size;
  int32_t num_threads; /* the caller's counts; 0: as many as the affinity mask and the cgroup allow */
  /* null: PENSTOCK_CPU, else the best; "generic" | "avx2" | "avx512" | "amx" | "neon" | "neon_dot" */
  const char* cpu_level;
  const struct ps_comm* comm;  /* null: one rank; else it outlives the context: penstock_ranks.h */
  const struct ps_comm* links; /* null: no pipeline; else the comm of all its ranks: penstock_ranks.h */
  int32_t stage_ranks;         /* of a pipeline: ranks of each stage; 0: 1 */
  int32_t reserved;            /* 0 */
} ps_context_options;
/* Starts the threads, which sleep between steps.  PS_UNSUPPORTED: the machine lacks the level's instructions. */
PS_API ps_status ps_context_create(const ps_context_options* options, ps_context** out);
/* Ends the threads, once the last program made with them is destroyed too. */
PS_API void ps_context_destroy(ps_context* context);
PS_API int32_t ps_context_num_threads(const ps_context* context);   /* 0: not an open context */
PS_API const char* ps_context_cpu_level(const ps_context* context); /* null: not an open context; static text */

/* ---- a user's own ops --------------------------------------------------------------------------------- */
struct ps_op_library; /* penstock_op.h: how to write one */
/* Loads the shared library at `path`, a file, and makes its ops known, all or none, to every model opened afterwards;
 * they and the library stay until the process ends.  The library's code runs with the program's rights: load what you
 * trust.  Nothing else, no bundle either, causes a library to be loaded.  The same library again changes nothing.
 * PS_IO_ERROR: it does not load; PS_INVALID_FILE: it has no ops; PS_UNSUPPORTED: of another ABI version;
 * PS_INVALID_ARGUMENT: an op is malformed, or of a name that another library has, by name. */
PS_API ps_status ps_ops_load(const char* path);
/* The same of a table that is part of the program, as in one that is linked statically. */
PS_API ps_status ps_ops_register(const struct ps_op_library* library);

/* ---- model ------------------------------------------------------------------------------------------ */
typedef struct ps_model_options {
  uint32_t struct_size;
  int32_t verify;       /* 1: also check the checksum of every segment, which reads the whole file */
  int32_t private_copy; /* 1: read the file into private memory instead of mapping it */
} ps_model_options;
/* Maps the file and checks all that it says about itself; weights are read when they are first used, and processes that
 * map the same file share its pages.  The file must not be written to while it is open.  PS_IO_ERROR, PS_INVALID_FILE,
 * or PS_UNSUPPORTED for a newer format, feature or op, by name. */
PS_API ps_status ps_model_open(const char* path, const ps_model_options* options, ps_model** out);
/* Copies the weights from the mapped file into private memory with transparent huge pages (ordinary ones where the
 * system grants none), read by the context's threads; the file's page cache is dropped behind, so that memory holds the
 * weights once.  The caller has seen that there is memory for ps_model_info.weight_bytes and a little more.  Programs
 * made afterwards read the copy.  Not beside another call with this model.  A file that shrank or changed since it was
 * opened is PS_INVALID_FILE, and the model stays as it was.  Does nothing the second time, or with private_copy. */
PS_API ps_status ps_model_load_huge(ps_model* model, ps_context* context);
/* Unmaps the file, once the last program made of it is destroyed too. */
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
  int32_t format_minor;           /* the file's; what one of a newer minor version has besides is not read */
  int32_t known_format_minor;     /* this library's */
  int32_t bidirectional; /* 1: attention is not causal, so each request of a step begins at position 0, whole */
  int32_t context_ranks; /* ranks that the pages of a request are dealt out to (docs/explanation/ranks.md) */
  int64_t prefix_token; /* of an encoder-decoder: the first token of the decoder, which a request's first step has, with
                           all tokens of the encoder before it; of a network with a prefix mask: the first
                           token behind the prompt, likewise; -1: another network */
  int32_t kind;         /* 0: a language model; 1: a general network, which ps_program_predict runs */
  int32_t num_inputs, num_outputs, num_sizes; /* of a general network, whose arrays and sizes have names */
} ps_model_info;
/* Fills `out`, whose struct_size the caller has set; costs nothing. */
PS_API ps_status ps_model_describe(const ps_model* model, ps_model_info* out);
/* A segment by name ("tokenizer.json", "config.json" ...): a view into the model, valid until it closes.
 * Without one of that name data is null and bytes is -1. */
PS_API ps_status ps_model_segment(const ps_model* model, const char* name, const void** data, int64_t* bytes);

/* An input or an output of a general network. */
typedef struct ps_value_info {
  uint32_t struct_size;
  int32_t dtype;     /* ps_dtype */
  const char* name;  /* as `sizes`, valid until the model closes */
  const char* sizes; /* the dims: expressions over the network's sizes, as in "B,3,32*h"; "": a scalar */
} ps_value_info;
/* A size of a general network: each run has its own, which the dims of its inputs tell. */
typedef struct ps_size_info {
  uint32_t struct_size;
  int32_t reserved;
  const char* name;           /* valid until the model closes */
  int64_t min, max, multiple; /* the size is from min to max, and a multiple */
  int64_t example;            /* one that the network takes */
} ps_size_info;
/* By index, below ps_model_info.num_inputs, num_outputs and num_sizes. */
PS_API ps_status ps_model_input(const ps_model* model, int32_t index, ps_value_info* out);
PS_API ps_status ps_model_output(const ps_model* model, int32_t index, ps_value_info* out);
PS_API ps_status ps_model_size(const ps_model* model, int32_t index, ps_size_info* out);

/* ---- tokenizer -------------------------------------------------------------------------------------- */
/* The tokenizer that export compiled into the bundle, used where it lies.  One whose parts are not among those that
 * docs/explanation/bundle-format.md names opens too, and tells the ids; encoding and decoding are then PS_UNSUPPORTED,
 * with what was found, and token ids in and out still work. */
typedef struct ps_tokenizer ps_tokenizer; /* read only: any number of threads may use one */
typedef struct ps_tokenizer_info {
  uint32_t struct_size;
  int32_t num_tokens;             /* ids are below; 0: it cannot encode and decode */
  int32_t bos_id, pad_id, unk_id; /* -1: none */
  int32_t num_eos_ids;
  const int32_t* eos_ids;  /* [num_eos_ids]: any of them ends a text; as the strings below until the tokenizer closes */
  const char* kind;        /* "byte-level BPE", "BPE with byte fallback", "WordPiece", "Unigram" or "" */
  const char* unsupported; /* why it cannot encode and decode; "": it can */
} ps_tokenizer_info;
/* PS_UNSUPPORTED for a bundle without one. */
PS_API ps_status ps_tokenizer_open(const ps_model* model, ps_tokenizer** out);
PS_API void ps_tokenizer_close(ps_tokenizer* tokenizer); /* it keeps its model until then */
PS_API ps_status ps_tokenizer_describe(const ps_tokenizer* tokenizer, ps_tokenizer_info* out);

#define PS_ENCODE_ADD_SPECIAL 1u /* with the special tokens that the tokenizer puts around a text */
/* Special tokens that are written in the text become their ids; else they are text. */
#define PS_ENCODE_PARSE_SPECIAL 2u
#define PS_DECODE_SKIP_SPECIAL 1u /* special tokens are no text */
#define PS_DECODE_PARTIAL 2u      /* more ids may follow: no text that they could change */
/* UTF-8 (not terminated) to ids.  *count is how many there are; those beyond capacity are not written. */
PS_API ps_status ps_tokenizer_encode(const ps_tokenizer* tokenizer, const char* text, int64_t bytes, uint32_t flags,
                                     int32_t* ids, int64_t capacity, int64_t* count);
/* The ids from *begin (null: 0) on to UTF-8 (not terminated).  *bytes is how many there are; those beyond capacity are
 * not written.  Where all were, *begin moves behind the ids whose text they are: to stream, append each new id, pass
 * all ids with PS_DECODE_PARTIAL and the same begin, and at the end once more without; the texts of the calls make up
 * the text of all ids. */
PS_API ps_status ps_tokenizer_decode(const ps_tokenizer* tokenizer, const int32_t* ids, int64_t num_ids, uint32_t flags,
                                     int64_t* begin, char* text, int64_t capacity, int64_t* bytes);

/* ---- program ---------------------------------------------------------------------------------------- */
typedef struct ps_program_options {
  uint32_t struct_size;
  int32_t max_tokens;   /* tokens in one step */
  int32_t max_requests; /* requests in one step */
  int32_t max_rows;     /* rows of logits in one step */
  int32_t num_pages;    /* KV pages of each page group that group_pages gives no other number */
  int32_t num_slots;    /* slots that remember the token last sampled */
  int32_t kv_layout;    /* ps_kv_layout; 0: PS_KV_F32 under the scheme f32, else PS_KV_BF16 */
  uint32_t flags;       /* 0: none are known */
  /* [num_page_groups], at most num_pages each; null, or an entry of 0: num_pages.  A group of layers with a window
   * needs pages only for the windows of max_requests requests and for the tokens of one step.  Not kept
   * after the call. */
  const int32_t* group_pages;
} ps_program_options;

typedef struct ps_plan {
  uint32_t struct_size;
  int64_t weight_bytes, temporary_bytes, scratch_bytes, kv_bytes, logits_bytes, total_bytes;
  int64_t kv_page_bytes; /* bytes of one page over all states */
} ps_plan;
/* The memory a program of these limits would take, KV pages included; allocates nothing.  Nothing else is allocated
 * later. */
PS_API ps_status ps_program_plan(const ps_model* model, const ps_context* context, const ps_program_options* options,
                                 ps_plan* out);
/* Plans and maps the memory, of which the system gives pages as they are first touched.  Limits outside what the model
 * can do are refused by name. */
PS_API ps_status ps_program_create(ps_model* model, ps_context* context, const ps_program_options* options,
                                   ps_program** out);
/* Gives a program other limits.  Pages and slots that both have keep their contents; there is no last step then.  For
 * its duration there is memory for both; a failure leaves the program as it was.  kv_layout cannot change. */
PS_API ps_status ps_program_resize(ps_program* program, const ps_program_options* options);
PS_API void ps_program_destroy(ps_program* program);

/* ps_program_hidden will be called: else rows that no logits are made of may be left out. */
#define PS_BATCH_HIDDEN 1u
/* ps_program_logits will be called: else ranks may exchange only the best token of each rank, where ps_program_step
 * samples greedily and nothing else is asked of a row. */
#define PS_BATCH_LOGITS 2u
/* Every rank runs this batch itself, and has its logits; else rank 0 runs it and the others follow
 * (ps_program_follow). */
#define PS_BATCH_ALL_RANKS 4u

/* One step: num_tokens tokens of num_requests requests, flat.  A request's tokens follow each other; a prompt may come
 * whole or in chunks, and one step may hold prompts and single tokens of other requests.  Which pages belong to a
 * request is the caller's to say: page i of its table holds positions 32 i to 32 i + 31, and what steps before wrote
 * there is what attention reads.  Every array is copied before the step begins.  Of a model with
 * ps_model_info.bidirectional a step holds whole requests only: else PS_UNSUPPORTED. */
typedef struct ps_batch {
  uint32_t struct_size;
  int32_t num_tokens, num_requests, num_rows, page_table_width;
  const int32_t* token_ids; /* [num_tokens]; -1-s: the token last sampled in slot s (ps_sampled: if that row failed) */
  const int32_t* positions; /* [num_tokens]; ascending by one within a request */
  const int32_t* request_starts; /* [num_requests+1]; first 0, last num_tokens, strictly ascending */
  const int32_t* page_tables;    /* [num_page_groups][num_requests][page_table_width]; -1: freed or unused */
  const int32_t* output_rows;    /* [num_rows]; indices of tokens whose logits are wanted */
  uint32_t flags;                /* PS_BATCH_* */
  uint32_t reserved;             /* 0 */
} ps_batch;

/* How to sample: arrays of one entry a row.  The order of processing is that of docs/explanation/numerics.md. */
typedef struct ps_sampling {
  uint32_t struct_size;
  int32_t num_rows;         /* the last step's */
  const float* temperature; /* 0: greedy */
  const int32_t* top_k;     /* 0: off */
  const float* top_p;       /* 1: off */
  const uint64_t* seed;
  const int64_t* counter;          /* [num_rows][2]: sample index, position of the token to be sampled */
  const int32_t* slot;             /* or null; where to remember the token, or that the row failed; -1: nowhere */
  const uint32_t* mask;            /* [num_rows][(vocab+31)/32] or null; bit set: token allowed */
  const float* min_p;              /* or null; 0: off */
  const float* typical_p;          /* or null; 1: off */
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
  PS_ROW_NOT_FINITE = 1, /* the row's logits hold a NaN or an infinity, or it follows a row that failed */
  PS_ROW_MASKED = 2      /* no token is allowed */
} ps_row_status;

/* What sampling makes.  Log-probabilities are those of the logits as the graph made them, before any bias, penalty or
 * temperature.  A row that failed has the id -1; without row_status the call fails instead, and slots keep what they
 * held. A later batch may name the slot of a row that failed: it runs, the logits of that request's rows are NaN, and
 * the rows fail.  So does a row whose history names the slot. */
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

/* Computes one step.  Refused before anything is computed: a count beyond the program's limits, a token outside the
 * vocabulary, a position beyond the context, a page that two requests write to, a row that is not a token of the
 * step. */
PS_API ps_status ps_program_run(ps_program* program, const ps_batch* batch);
/* Draws a token for each row of the last step.  A token is a function only of logits, parameters, seed and counter. */
PS_API ps_status ps_program_sample(ps_program* program, const ps_sampling* sampling, const ps_sampled* out);
/* Both in one; everything is checked before the step begins. */
PS_API ps_status ps_program_step(ps_program* program, const ps_batch* batch, const ps_sampling* sampling,
                                 const ps_sampled* out);

/* ---- tensors that a step leaves ------------------------------------------------------------------------ */
/* The last step's logits, [num_rows][vocab] f32, in the program's memory until the next run, resize or destroy. */
PS_API ps_status ps_program_logits(const ps_program* program, const float** logits, int32_t* num_rows, int32_t* vocab);
/* The last step's hidden rows, [num_tokens][width] f32, that its output rows were picked from: of a language model
 * those of the last norm.  In the program's memory until the next run, of a step with PS_BATCH_HIDDEN.  PS_UNSUPPORTED
 * for a graph that picks them otherwise. */
PS_API ps_status ps_program_hidden(const ps_program* program, const float** hidden, int32_t* num_tokens,
                                   int32_t* width);
/* Of a graph that ends in argmax or topk, the last step's ids [num_rows][k], best first, and of topk their logits
 * [num_rows][k], else null.  In the program's memory until the next run.  Such a graph is sampled greedily and has no
 * logits beside. */
PS_API ps_status ps_program_tail(const ps_program* program, const int32_t** ids, const float** values,
                                 int32_t* num_rows, int32_t* k);

/* ---- general networks ---------------------------------------------------------------------------------- */
/* A dense array, rows first, as C has them. */
typedef struct ps_array {
  void* data;
  int32_t dtype; /* ps_dtype; a PS_BOOL is a byte, 0 or 1 */
  int32_t ndim;  /* 0 to 6; 0: a scalar */
  int64_t dims[6];
} ps_array;
/* Runs a general network (ps_model_info.kind 1), whose program was made with options that are zero but for struct_size.
 * The arrays are the inputs, in the order of ps_model_input.  Their dims set the sizes of this run: memory is planned
 * for sizes that the program has not just had, and the plans of the last four are kept.  The program's memory grows to
 * the largest of them.  Inputs are read where they are if they are aligned; they may be outputs of the run before.
 * Refused, by name: another type, or dims that no sizes of the network give. */
PS_API ps_status ps_program_predict(ps_program* program, const ps_array* inputs, int32_t num_inputs);
/* Plans for inputs of these dims, and maps the memory, without running: data is not read. */
PS_API ps_status ps_program_prepare(ps_program* program, const ps_array* inputs, int32_t num_inputs);
/* An output of the last run, by index: a view that is valid until the next ps_program_predict, ps_program_prepare or
 * ps_program_destroy.  After ps_program_prepare, its dims only: data is null. */
PS_API ps_status ps_program_output(const ps_program* program, int32_t index, ps_array* out);
#ifdef __cplusplus
}
#endif
#endif /* PENSTOCK_H */
