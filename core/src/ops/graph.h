// The graph of a bundle in memory.  Its names point into the metadata, which must outlive it.
#ifndef PENSTOCK_OPS_GRAPH_H
#define PENSTOCK_OPS_GRAPH_H

#include "base/error.h"
#include "base/memory.h"

namespace ps {

constexpr int32_t kMaxRank = 6;
constexpr int32_t kMaxOperands = 11, kMaxOutputs = 3, kMaxAttrs = 13;
constexpr int32_t kMaxHeads = 4096;
constexpr int32_t kMaxContextLen = 1 << 24;  // positions are exact in float32

struct Dim {  // factor * symbols[symbol] + offset; symbol -1: only the offset
  int32_t symbol;
  int64_t factor, offset;
};
inline bool is_constant(const Dim& d) { return d.symbol < 0; }
inline Dim constant(int64_t n) { return Dim{-1, 0, n}; }
inline bool equal(const Dim& a, const Dim& b) {
  if (a.symbol != b.symbol || a.offset != b.offset) return false;
  return a.symbol < 0 || a.factor == b.factor;
}
inline int64_t evaluate(const Dim& d, const int64_t* symbols) {
  return d.symbol < 0 ? d.offset : d.factor * symbols[d.symbol] + d.offset;
}

// The symbols of a step by role; their names determine the roles.
enum Role { ROLE_TOKENS, ROLE_REQUESTS, ROLE_PAGES, ROLE_ROWS, NUM_ROLES };
enum Input { INPUT_TOKEN_IDS, INPUT_POSITIONS, INPUT_REQUEST_STARTS, INPUT_PAGE_TABLES, INPUT_OUTPUT_ROWS, NUM_INPUTS };

struct Symbol {
  Str name;
  int64_t min, max;
  int64_t multiple, example;  // general networks only
  int32_t role;               // language models only
};

struct Value {
  Str name;
  int32_t dtype, rank;
  Dim dims[kMaxRank];
  int32_t base;
  int64_t offset;
  Str sizes;       // shape of an input or output of a general network: a list of expressions
  int32_t weight;  // the constant that defines the value; -1: none
  // Found by validation:
  int32_t root;         // itself, or the value whose memory a view shares
  int64_t root_offset;  // elements into each row of the root
  int64_t row_elements, row_stride;
  int32_t producer;  // node, -1: an input
  Dim bound;         // int32 values are below it; the constant 0 if unknown
};

struct Part {
  Str name;
  int64_t row_start, num_rows;
};

struct Weight {
  Str name;
  int64_t rows, cols;
  int32_t layout, segment;
  int64_t offset, bytes;
  int64_t part_begin, part_end;  // into Graph::parts
  int32_t rank;                  // for constants
  int64_t shape[kMaxRank];
};

// Keys and values of a layer.  With `recurrent`: one state per page, after the page's last token, as head_dim float32
// numbers for each head.
struct State {
  Str name;
  int32_t num_kv_heads, head_dim, group, recurrent;
  int32_t latent_dim;  // 0: separate keys and values; else a row is stored once, and its first latent_dim dimensions
                       // are its value
};
constexpr int64_t kMaxStateElements = int64_t{1} << 26;  // for a recurrent state, all heads together

struct Attr {
  Str name;
  int32_t type;  // ps_attr's: 1 int, 2 float, 3 string
  int64_t i;
  double f;
  Str s;
};

enum OperandKind { OPERAND_NONE, OPERAND_VALUE, OPERAND_WEIGHT, OPERAND_STATE };
struct Operand { int32_t kind, index; };

struct Node {
  Str name;
  int32_t op;  // row of this build's op table
  int32_t num_inputs, num_outputs, num_attrs;
  Operand inputs[kMaxOperands];
  int32_t outputs[kMaxOutputs];
  Attr attrs[kMaxAttrs];  // as in the file; validation sorts them into the schema's order
  bool wanted_only;       // set when the model is opened: passes/wanted_rows.h
  bool prefix_only;       // likewise: passes/prefix_only.h
};

struct Segment {
  Str name;
  int64_t offset, bytes;
  uint32_t crc32;
};

struct OpUse {
  Str name;
  int32_t version;
};

enum GraphKind { KIND_LANGUAGE_MODEL = 0, KIND_NETWORK = 1 };
constexpr int32_t kMaxSizes = 64, kMaxNetworkInputs = 64;  // for general networks; there can be as many outputs as
                                                           // inputs

struct Graph {
  int32_t kind = KIND_LANGUAGE_MODEL;
  Str network{nullptr, 0}, scheme{nullptr, 0};
  int32_t vocab_size = 0, context_len = 0;
  Vec<Symbol> symbols;
  Vec<OpUse> ops;
  Vec<Value> values;
  Vec<Weight> weights;
  Vec<Part> parts;
  Vec<State> states;
  Vec<int32_t> page_groups;  // windows
  Vec<Node> nodes;
  Vec<Segment> segments;
  Vec<int32_t> network_inputs, network_outputs;  // general networks only; these have none of the inputs and output
                                                 // below
  int32_t inputs[NUM_INPUTS] = {};
  int32_t output = -1;
  // Found by validation:
  int32_t tail = -1;           // the argmax or topk node whose ids are the output; -1: the output is logits
  int32_t tail_k = 0;          // ids of a row; 0: the output is logits
  int32_t hidden = -1;         // the value from which output rows are picked; -1: none
  bool bidirectional = false;  // attention is not causal somewhere: all tokens of a request must be in one step
  int32_t prefix_token =
      -1;  // that begins the decoder: a request's tokens before it and itself run in one step; -1: none
  int32_t prefix_group = -1;  // the page group that stores the lengths of prefixes
  int32_t context_world = 1;  // number of ranks over which the pages of a context are split
  uint64_t whole_groups = 0;  // bit g: every rank has all pages of group g
  int32_t symbol_of[NUM_ROLES] = {-1, -1, -1, -1};
};

}  // namespace ps

#endif
