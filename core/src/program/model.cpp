// Opening and verifying a bundle, and copying its weights into private memory.
#include "program/model.h"

#include <algorithm>

#include "base/build.h"
#include "base/crc32.h"
#include "bundle/metadata.h"
#include "bundle/validate.h"
#include "passes/prefix_only.h"
#include "passes/wanted_rows.h"

namespace ps {
namespace {

// Checks every segment's checksum, and that the bytes between segments are zero.
ps_status verify_contents(const ps_model& model, const Header& header) {
  const Graph& graph = model.graph;
  const uint8_t* data = model.file.data();
  int64_t end = kHeaderBytes + static_cast<int64_t>(header.metadata_bytes);
  for (int64_t i = 0; i < graph.segments.size(); ++i) {  // validated to be in the order of their offsets
    const Segment& segment = graph.segments[i];
    for (; end < segment.offset; ++end) {
      if (data[end])
        return fail(PS_INVALID_FILE, "file: expected zero between segments, got %u at byte %lld", data[end],
                    static_cast<long long>(end));
    }
    const uint32_t crc = crc32(0, data + segment.offset, segment.bytes);
    if (crc != segment.crc32) {
      return fail(PS_INVALID_FILE, "segments[%lld] (%.*s).crc32: expected 0x%08x, got 0x%08x: the file is damaged",
                  static_cast<long long>(i), PS_STR(segment.name), segment.crc32, crc);
    }
    end = segment.offset + segment.bytes;
  }
  return PS_OK;
}

ps_status open_checked(ps_model* model, const char* path, bool map, bool verify) {
  PS_TRY(model->file.open(path, map));
  Header header;
  PS_TRY(read_header(model->file, &header));
  model->format_minor = header.minor;
  const int64_t bytes = static_cast<int64_t>(header.metadata_bytes);
  if (!model->metadata.allocate(bytes + 16))
    return fail(PS_OUT_OF_MEMORY, "metadata: no memory for %lld bytes", static_cast<long long>(bytes));
  PS_TRY(model->file.read(static_cast<int64_t>(header.metadata_offset), bytes, model->metadata.data()));
  const uint32_t crc = crc32(0, model->metadata.data(), bytes);
  if (crc != header.metadata_crc32) {
    return fail(PS_INVALID_FILE, "header.metadata_crc32: expected 0x%08x, got 0x%08x: the file is damaged",
                header.metadata_crc32, crc);
  }
  PS_TRY(read_metadata(FlatBuffer{model->metadata.data(), static_cast<uint32_t>(bytes)}, &model->graph));
  const int64_t end = round_up(kHeaderBytes + bytes, kPageBytes);
  PS_TRY(validate_storage(&model->graph, end, model->file.bytes()));
  const bool needs_network = header.required_features & kFeatureNetwork;
  if (needs_network != (model->graph.kind == KIND_NETWORK)) {
    return fail(PS_INVALID_FILE, "header.required_features: expected 0x%x for metadata.kind %d, got 0x%x",
                needs_network ? 0 : kFeatureNetwork, model->graph.kind, header.required_features);
  }
  if (kBuildsNetworks && needs_network) {
    PS_TRY(validate_network(&model->graph));
    return verify ? verify_contents(*model, header) : PS_OK;
  }
  PS_TRY(validate_graph(&model->graph));
  PS_TRY(mark_wanted_only(&model->graph));
  PS_TRY(mark_prefix_only(&model->graph));
  return verify ? verify_contents(*model, header) : PS_OK;
}

}  // namespace

ps_status open_model(ps_model* model, const char* path, bool map, bool verify) {
  const ps_status status = open_checked(model, path, map, verify);
  return status == PS_OK ? PS_OK : prefix(status, "%s: ", path);
}

ps_status populate_model(ps_model* model, Pool* pool) {
  const Graph& graph = model->graph;
  int64_t begin = INT64_MAX, end = 0;
  for (const Weight& weight : graph.weights) {
    const Segment& segment = graph.segments[weight.segment];
    begin = std::min(begin, segment.offset);
    end = std::max(end, segment.offset + segment.bytes);
  }
  return model->file.copy(begin, end, pool);
}

const Segment* find_segment(const ps_model& model, const char* name) {
  for (const Segment& segment : model.graph.segments) {
    if (equal(segment.name, name)) return &segment;
  }
  return nullptr;
}

int64_t bytes_per_token(const ps_model& model) {
  const Graph& graph = model.graph;
  Vec<uint8_t> whole;
  if (!whole.resize(graph.weights.size())) return 0;
  int64_t bytes = 0;
  for (const Node& node : graph.nodes) {
    const bool is_table = node.op == OP_EMBEDDING;
    for (int32_t i = 0; i < node.num_inputs; ++i) {
      if (node.inputs[i].kind != OPERAND_WEIGHT) continue;
      const Weight& weight = graph.weights[node.inputs[i].index];
      uint8_t& counted = whole[node.inputs[i].index];
      if (is_table) {
        bytes += weight.bytes / weight.rows;
      } else if (!counted) {
        counted = 1;
        bytes += weight.bytes;
      }
    }
  }
  return bytes;
}

}  // namespace ps
