/* Penstock native core: the C API.  Open a bundle, plan its memory, run steps, sample tokens; C99 and C++.
 *
 *   ps_context_create -> ps_model_open -> ps_program_create -> ps_program_step ... -> destroy, close
 *
 * A bundle of a general network is run with ps_program_predict instead: arrays in, arrays out.
 *
 * examples/c/generate.c is a complete program; docs/guides/devices.md explains how to build, shrink and link the
 * library.
 *
 * Errors.  A function that can fail returns a ps_status.  ps_error_message() then names the argument or field of the
 * calling thread's last failure, what was expected and what it got.  A function that fails leaves its outputs unchanged
 * or null.  No exception crosses this boundary, and nothing is printed.
 *
 * Ownership.  Handles (ps_context, ps_model, ps_program, ps_tokenizer) belong to the caller, which releases them with
 * their destroy or close function; these functions accept null.  The order does not matter: a program keeps its model
 * and its context alive, and a tokenizer its model.  A handle is not an address and is never reused: every function
 * refuses a handle that was released, and any other pointer.  Arguments, strings and arrays included, are read only
 * during the call and stay the caller's.  Views (segments, logits ...) point into the handle's memory and are valid as
 * long as each one says.
 *
 * Threads.  Any function may be called from any thread.  A program serves one call at a time and refuses a second one
 * from another thread meanwhile.  Release a handle only when no other thread is in a call with it or about to make one:
 * contexts, models and tokenizers are not protected against that, and programs only against calls in progress.
 * Programs that share a context take turns inside a step.  A context's threads do not exist in a forked child, where
 * its steps are refused; create a context in the child.
 *
 * Floating point.  Functions that compute set their own floating-point environment: they round to nearest, keep
 * subnormal numbers and mask all exceptions, whatever the calling thread has set.  The caller's settings are restored
 * on return.
 *
 * Structs that may grow begin with struct_size, which the caller sets to sizeof(the struct).  A field that the caller's
 * older struct lacks counts as zero, and zero is always a valid default.  Fields of a newer header that the library
 * does not know must be zero; otherwise the call fails with PS_UNSUPPORTED and names the struct.  In output structs
 * they are set to zero.
 *
 * Versions.  PS_ABI_VERSION is raised when programs have to be compiled again; the shared library's soname contains it.
 * PS_VERSION is the release: within 1.x functions and fields are only added (0.x may change with the minor version).
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
  PS_INVALID_ARGUMENT = 1, /* an error of the caller: the message names the field */
  PS_INVALID_FILE = 2,     /* the bundle is damaged or malicious: the message names file and field */
  PS_UNSUPPORTED = 3,      /* a valid request that this build does not support: the message names it */
  PS_OUT_OF_MEMORY = 4,
  PS_IO_ERROR = 5,
  PS_INTERNAL = 6,
  PS_ABORTED = 7 /* ranks: a rank failed or the owner ended the group, which cannot be used any more */
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

/* How keys and values are stored in their pages: exact, or smaller and faster (docs/explanation/numerics.md). */
typedef enum ps_kv_layout { PS_KV_F32 = 1, PS_KV_BF16 = 2, PS_KV_INT8 = 3, PS_KV_INT4 = 4 } ps_kv_layout;

typedef struct ps_context ps_context; /* instruction level and thread pool */
typedef struct ps_model ps_model;     /* an opened, validated bundle */
typedef struct ps_program ps_program; /* a model with its memory: temporaries, KV pages, logits */

/* ---- errors, version -------------------------------------------------------------------------------- */
/* The message of this thread's last failed call, or "no error"; never null.  Valid until the thread's next failure. */
PS_API const char* ps_error_message(void);
PS_API const char* ps_version(void); /* the library's PS_VERSION */
PS_API int32_t ps_abi_version(void); /* the library's PS_ABI_VERSION */

/* ---- context: threads and instruction level --------------------------------------------------------- */
typedef struct ps_context_options {
  uint32_t struct_size;
  int32_t num_threads; /* including the calling thread; 0: as many as the affinity mask and the cgroup allow */
  /* null: PENSTOCK_CPU, else the best; "generic" | "avx2" | "avx512" | "amx" | "neon" | "neon_dot" */
  const char* cpu_level;
  const struct ps_comm* comm;  /* null: one rank; otherwise it must outlive the context: penstock_ranks.h */
  const struct ps_comm* links; /* null: no pipeline; else the comm of all its ranks: penstock_ranks.h */
  int32_t stage_ranks;         /* pipeline only: ranks of each stage; 0: 1 */
  int32_t reserved;            /* 0 */
} ps_context_options;
/* Starts the threads, which sleep between steps.  PS_UNSUPPORTED: the machine lacks the level's instructions. */
PS_API ps_status ps_context_create(const ps_context_options* options, ps_context** out);
/* Ends the threads once the last program that uses them is destroyed too. */
PS_API void ps_context_destroy(ps_context* context);
PS_API int32_t ps_context_num_threads(const ps_context* context);   /* 0: not an open context */
PS_API const char* ps_context_cpu_level(const ps_context* context); /* null: not an open context; static text */

/* ---- custom ops ---------------------------------------------------------------------------------------- */
struct ps_op_library; /* penstock_op.h: how to write one */
/* Loads the shared library at `path`, a file, and registers its ops, all or none, for every model opened afterwards.
 * The ops and the library stay loaded until the process ends.  The library's code runs with the program's rights: load
 * only libraries that you trust.  Nothing else loads a library, not even a bundle.  Loading the same library again has
 * no effect.  PS_IO_ERROR: it cannot be loaded; PS_INVALID_FILE: it has no ops; PS_UNSUPPORTED: it has another ABI
 * version; PS_INVALID_ARGUMENT names an op that is malformed, or that another library has already registered. */
PS_API ps_status ps_ops_load(const char* path);
/* The same for a table in the program itself, as in a statically linked one. */
PS_API ps_status ps_ops_register(const struct ps_op_library* library);

/* ---- model ------------------------------------------------------------------------------------------ */
typedef struct ps_model_options {
  uint32_t struct_size;
  int32_t verify;       /* 1: also check the checksum of every segment, which reads the whole file */
  int32_t private_copy; /* 1: read the file into private memory instead of mapping it */
} ps_model_options;
/* Maps the file and validates its metadata.  Weights are read when they are first used, and processes that map the same
 * file share its pages.  The file must not be modified while it is open.  PS_IO_ERROR, PS_INVALID_FILE, or
 * PS_UNSUPPORTED, which names the newer format, feature or op. */
PS_API ps_status ps_model_open(const char* path, const ps_model_options* options, ps_model** out);
/* Copies the weights from the mapped file into private memory with transparent huge pages (ordinary ones where the
 * system grants none).  The context's threads read the file and drop it from the page cache as they go, so that memory
 * holds the weights only once.  The caller checks that ps_model_info.weight_bytes and a little more are free.  Programs
 * created afterwards read the copy.  No other call may use the model meanwhile.  PS_INVALID_FILE if the file shrank or
 * changed since it was opened; the model is then unchanged.  Has no effect the second time, or with private_copy. */
PS_API ps_status ps_model_load_huge(ps_model* model, ps_context* context);
/* Unmaps the file once the last program made from the model is destroyed too. */
PS_API void ps_model_close(ps_model* model);

typedef struct ps_model_info {
  uint32_t struct_size;
  int32_t vocab_size, context_len, num_states, num_page_groups, num_weights, num_nodes;
  int64_t weight_bytes, file_bytes;
  int64_t weight_bytes_per_token; /* bytes of weights that one decoded token at batch 1 reads */
  const char *network, *scheme;   /* valid until the model closes */
  const int32_t* page_windows;    /* [num_page_groups]; 0: every position is kept */
  int32_t hidden_size;            /* width of the rows of ps_program_hidden; 0: the graph has none */
  int32_t tail_k;                 /* ids in each row of ps_program_tail; 0: the graph ends in logits */
  const char* tail;               /* the op that ends the graph, "argmax" or "topk"; "": it ends in logits */
  int32_t format_minor;           /* the file's minor version; additions newer than known_format_minor are not read */
  int32_t known_format_minor;     /* the newest minor version that this library knows */
  int32_t bidirectional; /* 1: attention is not causal, so a request has to be whole in one step, from position 0 */
  int32_t context_ranks; /* ranks that share the pages of a request (docs/explanation/ranks.md) */
  int64_t prefix_token; /* encoder-decoder: the first token of the decoder, which must be in a request's first step with
                           all tokens of the encoder before it; prefix mask: likewise the first token after the prompt;
                           -1: other networks */
  int32_t kind;         /* 0: a language model; 1: a general network, which ps_program_predict runs */
  int32_t num_inputs, num_outputs, num_sizes; /* general networks only: arrays and sizes, which have names */
} ps_model_info;
/* Fills `out`, whose struct_size the caller has set; costs nothing. */
PS_API ps_status ps_model_describe(const ps_model* model, ps_model_info* out);
/* Finds a segment by name ("tokenizer.json", "config.json" ...): a view into the model, valid until it closes.  If
 * there is none of that name, data is null and bytes is -1. */
PS_API ps_status ps_model_segment(const ps_model* model, const char* name, const void** data, int64_t* bytes);

/* An input or an output of a general network. */
typedef struct ps_value_info {
  uint32_t struct_size;
  int32_t dtype;     /* ps_dtype */
  const char* name;  /* valid, like `sizes`, until the model closes */
  const char* sizes; /* the shape: expressions over the network's sizes, such as "B,3,32*h"; "": a scalar */
} ps_value_info;
/* A named size of a general network.  The shapes of a run's inputs determine its value. */
typedef struct ps_size_info {
  uint32_t struct_size;
  int32_t reserved;
  const char* name;           /* valid until the model closes */
  int64_t min, max, multiple; /* the value is from min to max, and a multiple of `multiple` */
  int64_t example;            /* a value that is valid */
} ps_size_info;
/* By index, below ps_model_info.num_inputs, num_outputs and num_sizes. */
PS_API ps_status ps_model_input(const ps_model* model, int32_t index, ps_value_info* out);
PS_API ps_status ps_model_output(const ps_model* model, int32_t index, ps_value_info* out);
PS_API ps_status ps_model_size(const ps_model* model, int32_t index, ps_size_info* out);

/* ---- tokenizer -------------------------------------------------------------------------------------- */
/* The tokenizer that export compiled into the bundle, used without a copy.  A tokenizer with parts that
 * docs/explanation/bundle-format.md does not list can be opened too: its special ids are known and token ids still
 * work, but encoding and decoding fail with PS_UNSUPPORTED and name the part. */
typedef struct ps_tokenizer ps_tokenizer; /* read only: any number of threads may use one */
typedef struct ps_tokenizer_info {
  uint32_t struct_size;
  int32_t num_tokens;             /* ids are below this; 0: it cannot encode or decode */
  int32_t bos_id, pad_id, unk_id; /* -1: none */
  int32_t num_eos_ids;
  const int32_t* eos_ids;  /* [num_eos_ids]: any of them ends a text; valid, like the strings below, until the tokenizer
                              closes */
  const char* kind;        /* "byte-level BPE", "BPE with byte fallback", "WordPiece", "Unigram" or "" */
  const char* unsupported; /* why it cannot encode or decode; "": it can */
} ps_tokenizer_info;
/* PS_UNSUPPORTED if the bundle has no tokenizer. */
PS_API ps_status ps_tokenizer_open(const ps_model* model, ps_tokenizer** out);
PS_API void ps_tokenizer_close(ps_tokenizer* tokenizer); /* which keeps its model alive until then */
PS_API ps_status ps_tokenizer_describe(const ps_tokenizer* tokenizer, ps_tokenizer_info* out);

#define PS_ENCODE_ADD_SPECIAL 1u /* add the special tokens that the tokenizer puts around a text */
/* Special tokens written in the text become their ids; without the flag they are ordinary text. */
#define PS_ENCODE_PARSE_SPECIAL 2u
#define PS_DECODE_SKIP_SPECIAL 1u /* leave out special tokens */
#define PS_DECODE_PARTIAL 2u      /* more ids may follow: leave out text that they could change */
/* Encodes UTF-8 (not terminated) to ids. *count is their number; ids beyond capacity are not written. */
PS_API ps_status ps_tokenizer_encode(const ps_tokenizer* tokenizer, const char* text, int64_t bytes, uint32_t flags,
                                     int32_t* ids, int64_t capacity, int64_t* count);
/* Decodes the ids from *begin (null: 0) on to UTF-8 (not terminated). *bytes is the length of the text; bytes beyond
 * capacity are not written.  If everything fits, *begin advances past the ids whose text is complete.  To stream,
 * append each new id, pass all ids with PS_DECODE_PARTIAL and the same begin, and at the end once more without the
 * flag; the texts of all calls joined are the text of all ids. */
PS_API ps_status ps_tokenizer_decode(const ps_tokenizer* tokenizer, const int32_t* ids, int64_t num_ids, uint32_t flags,
                                     int64_t* begin, char* text, int64_t capacity, int64_t* bytes);

/* ---- program ---------------------------------------------------------------------------------------- */
typedef struct ps_program_options {
  uint32_t struct_size;
  int32_t max_tokens;   /* tokens in one step */
  int32_t max_requests; /* requests in one step */
  int32_t max_rows;     /* rows of logits in one step */
  int32_t num_pages;    /* KV pages of each page group that group_pages does not set */
  int32_t num_slots;    /* slots that remember the token last sampled */
  int32_t kv_layout;    /* ps_kv_layout; 0: PS_KV_F32 under the scheme f32, else PS_KV_BF16 */
  uint32_t flags;       /* must be 0 */
  /* [num_page_groups], at most num_pages each; null, or an entry of 0: num_pages.  A group of layers with a sliding
   * window needs pages only for the windows of max_requests requests and for the tokens of one step.  Read only during
   * the call. */
  const int32_t* group_pages;
} ps_program_options;

typedef struct ps_plan {
  uint32_t struct_size;
  int64_t weight_bytes, temporary_bytes, scratch_bytes, kv_bytes, logits_bytes, total_bytes;
  int64_t kv_page_bytes; /* bytes of one page, all states together */
} ps_plan;
/* The memory that a program with these limits takes, KV pages included.  Allocates nothing.  A program allocates
 * nothing else later. */
PS_API ps_status ps_program_plan(const ps_model* model, const ps_context* context, const ps_program_options* options,
                                 ps_plan* out);
/* Plans and maps the memory; the system commits pages when they are first touched.  Limits that exceed the model's are
 * refused by name. */
PS_API ps_status ps_program_create(ps_model* model, ps_context* context, const ps_program_options* options,
                                   ps_program** out);
/* Changes a program's limits.  Pages and slots that exist before and after keep their contents; the results of the last
 * step are dropped.  Needs memory for both programs meanwhile; a failure leaves the program unchanged. kv_layout cannot
 * change. */
PS_API ps_status ps_program_resize(ps_program* program, const ps_program_options* options);
PS_API void ps_program_destroy(ps_program* program);

/* ps_program_hidden will be called.  Without the flag, rows without logits may be skipped. */
#define PS_BATCH_HIDDEN 1u
/* ps_program_logits will be called.  Without the flag, ranks may exchange only the best token of each rank if
 * ps_program_step samples greedily and without log-probabilities. */
#define PS_BATCH_LOGITS 2u
/* Every rank runs this batch itself and has its logits.  Without the flag, rank 0 runs it and the others follow
 * (ps_program_follow). */
#define PS_BATCH_ALL_RANKS 4u

/* One step: num_tokens tokens of num_requests requests, concatenated.  A prompt may come whole or in chunks, and a step
 * may mix prompts and single tokens of other requests.  The caller assigns pages to requests: page i of a request's
 * table holds positions 32 i to 32 i + 31, and attention reads what earlier steps wrote there.  Every array is copied
 * before the step begins.  With ps_model_info.bidirectional a step must hold whole requests (PS_UNSUPPORTED). */
typedef struct ps_batch {
  uint32_t struct_size;
  int32_t num_tokens, num_requests, num_rows, page_table_width;
  const int32_t* token_ids;      /* [num_tokens]; -1-s: the token last sampled in slot s (see ps_sampled for a row that
                                    failed) */
  const int32_t* positions;      /* [num_tokens]; ascending by one within a request */
  const int32_t* request_starts; /* [num_requests+1]; first 0, last num_tokens, strictly ascending */
  const int32_t* page_tables;    /* [num_page_groups][num_requests][page_table_width]; -1: freed or unused */
  const int32_t* output_rows;    /* [num_rows]; indices of tokens whose logits are wanted */
  uint32_t flags;                /* PS_BATCH_* */
  uint32_t reserved;             /* 0 */
} ps_batch;

/* Sampling parameters: arrays with one entry per row. docs/explanation/numerics.md gives the order of processing. */
typedef struct ps_sampling {
  uint32_t struct_size;
  int32_t num_rows;         /* of the last step */
  const float* temperature; /* 0: greedy */
  const int32_t* top_k;     /* 0: off */
  const float* top_p;       /* 1: off */
  const uint64_t* seed;
  const int64_t* counter;          /* [num_rows][2]: sample index, position of the token to be sampled */
  const int32_t* slot;             /* or null; slot that stores the token, or that the row failed; -1: none */
  const uint32_t* mask;            /* [num_rows][(vocab+31)/32] or null; bit set: token allowed */
  const float* min_p;              /* or null; 0: off */
  const float* typical_p;          /* or null; 1: off */
  const float* repetition_penalty; /* or null; 1: off; applies to the tokens in a row's history */
  const float* presence_penalty;   /* or null; 0: off; applies to the history's tokens after the prompt */
  const float* frequency_penalty;  /* or null; 0: off; applies to the history's tokens after the prompt */
  const int32_t* history_starts;   /* [num_rows+1] or null: where each row's history begins, from 0 */
  const int32_t* prompt_lens;      /* number of tokens of a row's history that are the prompt */
  const int32_t* history;          /* token ids, the prompt's first; -1-s: the token last sampled in slot s */
  const int32_t* bias_starts;      /* [num_rows+1] or null: where each row's biases begin, from 0 */
  const int32_t* bias_ids;         /* tokens */
  const float* bias;               /* added to their logits; minus infinity forbids one */
  const int32_t* target;           /* or null; the token to score instead of sampling one, -1: sample */
  const int32_t* num_logprobs;     /* or null: 0; number of most likely tokens to list, -1: no log-probability */
} ps_sampling;

typedef enum ps_row_status {
  PS_ROW_OK = 0,
  PS_ROW_NOT_FINITE = 1, /* the row's logits contain a NaN or an infinity, or an earlier row of the request failed */
  PS_ROW_MASKED = 2      /* no token is allowed */
} ps_row_status;

/* The output of sampling.  Log-probabilities are those of the graph's logits before any bias, penalty or temperature.
 * A row that failed has the id -1; without row_status the call fails instead, and slots keep their tokens.  A later
 * batch may name the slot of a row that failed: the batch runs, but the logits of that request are NaN and its rows
 * fail.  A row whose history names the slot fails too. */
typedef struct ps_sampled {
  uint32_t struct_size;
  int32_t num_top;     /* columns of the lists of most likely tokens; 0: none */
  int32_t* ids;        /* [num_rows] */
  float* logprobs;     /* [num_rows] or null; NaN where none was asked for */
  int32_t* ranks;      /* [num_rows] or null; 1: the most likely token; the smaller id is ahead among equals */
  int32_t* row_status; /* [num_rows] or null: ps_row_status */
  int32_t* top_ids;    /* [num_rows][num_top], most likely first; -1 after the row's num_logprobs */
  float* top_logprobs; /* [num_rows][num_top] */
} ps_sampled;

/* Computes one step.  Refuses, before it computes anything, a count beyond the program's limits, a token outside the
 * vocabulary, a position beyond the context, a page that two requests write to, and a row that is not a token of the
 * step. */
PS_API ps_status ps_program_run(ps_program* program, const ps_batch* batch);
/* Draws a token for each row of the last step.  A token depends only on logits, parameters, seed and counter. */
PS_API ps_status ps_program_sample(ps_program* program, const ps_sampling* sampling, const ps_sampled* out);
/* Runs and samples in one call; checks everything before the step begins. */
PS_API ps_status ps_program_step(ps_program* program, const ps_batch* batch, const ps_sampling* sampling,
                                 const ps_sampled* out);

/* ---- tensors that a step leaves ------------------------------------------------------------------------ */
/* The last step's logits, [num_rows][vocab] f32, in the program's memory until the next run, resize or destroy. */
PS_API ps_status ps_program_logits(const ps_program* program, const float** logits, int32_t* num_rows, int32_t* vocab);
/* The last step's hidden rows, [num_tokens][width] f32, from which its output rows were picked: in a language model the
 * output of the last norm.  In the program's memory until the next run; needs a step with PS_BATCH_HIDDEN.
 * PS_UNSUPPORTED for a graph that has no such rows. */
PS_API ps_status ps_program_hidden(const ps_program* program, const float** hidden, int32_t* num_tokens,
                                   int32_t* width);
/* For a graph that ends in argmax or topk: the last step's ids [num_rows][k], best first, and for topk their logits
 * [num_rows][k], otherwise null.  In the program's memory until the next run.  Such a graph has no other logits, and
 * sampling is greedy. */
PS_API ps_status ps_program_tail(const ps_program* program, const int32_t** ids, const float** values,
                                 int32_t* num_rows, int32_t* k);

/* ---- general networks ---------------------------------------------------------------------------------- */
/* A dense array in row-major order. */
typedef struct ps_array {
  void* data;
  int32_t dtype; /* ps_dtype; a PS_BOOL is one byte, 0 or 1 */
  int32_t ndim;  /* 0 to 6; 0: a scalar */
  int64_t dims[6];
} ps_array;
/* Runs a general network (ps_model_info.kind 1).  Its program is created with options that are zero except for
 * struct_size.  The arrays are the inputs, in the order of ps_model_input, and their shapes set the sizes of this run.
 * Memory is planned when the sizes change; the plans of the last four sets of sizes are kept, and the program's memory
 * grows to the largest.  Aligned inputs are read in place; they may be outputs of the run before.  Another type, or
 * shapes that match no sizes of the network, are refused by name. */
PS_API ps_status ps_program_predict(ps_program* program, const ps_array* inputs, int32_t num_inputs);
/* Plans for inputs of these shapes and maps the memory, without running.  The data is not read. */
PS_API ps_status ps_program_prepare(ps_program* program, const ps_array* inputs, int32_t num_inputs);
/* An output of the last run, by index: a view that is valid until the next ps_program_predict, ps_program_prepare or
 * ps_program_destroy.  After ps_program_prepare it has only a shape: data is null. */
PS_API ps_status ps_program_output(const ps_program* program, int32_t index, ps_array* out);
#ifdef __cplusplus
}
#endif
#endif /* PENSTOCK_H */
