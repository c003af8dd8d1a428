// A model: an opened bundle with its validated graph.
#ifndef PENSTOCK_PROGRAM_MODEL_H
#define PENSTOCK_PROGRAM_MODEL_H

#include "base/handles.h"
#include "bundle/file.h"
#include "ops/graph.h"

// An opened, validated bundle.
struct ps_model : ps::Held {
  ps::File file;
  ps::Region metadata;  // a private copy, so that checked data cannot change
  ps::Graph graph;
  uint16_t format_minor = 0;
};

namespace ps {

ps_status open_model(ps_model* model, const char* path, bool map, bool verify);

// Copies the range from the first to the last segment with weights into private memory.
ps_status populate_model(ps_model* model, Pool* pool);

const Segment* find_segment(const ps_model& model, const char* name);  // null: there is none

// Bytes of weights that one token reads: every weight once, but only one row of an embedding table.
int64_t bytes_per_token(const ps_model& model);

inline const uint8_t* weight_data(const ps_model& model, const Weight& weight) {
  return model.file.at(model.graph.segments[weight.segment].offset + weight.offset);
}

}  // namespace ps

#endif
