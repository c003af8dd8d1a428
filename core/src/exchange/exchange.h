// State shared by the ops that communicate between ranks, and how a value is split over ranks.
#ifndef PENSTOCK_EXCHANGE_EXCHANGE_H
#define PENSTOCK_EXCHANGE_EXCHANGE_H

#include "ops/ops.h"

namespace ps {

// Rank r has the columns, or the rows of a table, from starts[r] to starts[r + 1].  As text: "0|704|1408".
struct Cut {
  int32_t world;
  int64_t starts[PS_MAX_RANKS + 1];
  int64_t total() const { return starts[world]; }
  int64_t size(int32_t rank) const { return starts[rank + 1] - starts[rank]; }
};
bool read_cut(Str text, Cut* out);

// The result of a step that needs only the best tokens, in the memory of the logits.  First the best logit of each rank
// [rows][world], or NaN if the rank's part of the row contains a NaN or plus infinity; then their token ids
// [rows][world].
struct BestTokens {
  float* values;
  int32_t* ids;
};
inline BestTokens best_tokens(uint8_t* logits, int64_t rows, int32_t world) {
  float* values = reinterpret_cast<float*>(logits);
  return BestTokens{values, reinterpret_cast<int32_t*>(values + rows * world)};
}
constexpr int64_t kBestFloats = 2;  // per row and rank
// The group of an op that communicates, from its attributes, which its shape rule has checked; world is 0 for other
// ops. `within`: it may be one of several consecutive groups of a comm.
struct Membership {
  int32_t rank, world;
  bool within;
  bool fits(const ps_comm& comm) const {
    return within ? comm.world % world == 0 && comm.rank % world == rank : comm.world == world && comm.rank == rank;
  }
};
Membership membership_of(int32_t op, const AttrValue* attrs);
ps_status no_links(const Membership& member);  // refuses a pipeline rank without links
ps_status check_membership(const AttrValue& world, const AttrValue& rank);
// The maximum bytes of this rank's part of an exchange, for a call with the maximum sizes of a step.
int64_t part_bytes(int32_t op, const Call& call);
int64_t context_part_bytes(const Call& call);  // for context_attention

// The operand of an all_gather, if the node before stores it directly into the rank's part of the exchange.
struct DirectPart {
  Tensor *written, *read;
  uint8_t* temporary;  // used while the part is not free
  void aim(void* part) const { written->data = read->data = part ? static_cast<uint8_t*>(part) : temporary; }
};

// The exchange state of a program whose context has a comm.  After the first exchange that fails, the later ones of the
// step have no effect.
struct Exchange {
  const ps_comm* comm;   // for collectives
  const ps_comm* links;  // for send and recv
  uint64_t tag;          // of the next exchange of the step
  bool best_only;        // the step needs only the best token of each row of logits
  bool on_all;           // every rank reads the logits, not only rank 0
  bool has_hidden;       // the step needs the hidden rows
  ps_status status;
  char message[512];
  const void* parts[PS_MAX_RANKS];
  int64_t bytes[PS_MAX_RANKS];

  void gather(const Call& call);  // bytes -> parts
  const DirectPart* first;        // for the step's first exchange
  // Keeps the first failure and its message; returns the status.
  ps_status keep(ps_status found);
};

}  // namespace ps

#endif
