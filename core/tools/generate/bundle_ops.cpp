// bundle_ops OUT.h KV_LAYOUTS BUNDLE... writes the header that core/src/base/build.h includes: the ops, linear schemes
// and layouts that the bundles need.  CMake runs it for PENSTOCK_OPS_FROM on the build machine.
#include <stdio.h>
#include <string.h>

#include "base/crc32.h"
#include "bundle/file.h"
#include "bundle/metadata.h"
#include "ops/ops.h"

namespace ps {
namespace {

constexpr const char* kSchemeNames[] = {
    "f32", "f16", "bf16", "w8a16", "w8a8", "w4a16", "w4a8", "w8a8_h32", "w4a8_h32",
#define PS_BLOCKS(id, name, ...) #name,
#include "base/block_schemes.inc"
};

struct Needs {
  bool ops[NUM_OPS];
  bool schemes[sizeof(kSchemeNames) / sizeof(*kSchemeNames)];
  uint64_t layouts;
  uint32_t kv_layouts;
  bool networks;
};

ps_status read_graph(const char* path, Region* metadata, Graph* graph) {
  File file;
  Header header;
  PS_TRY(file.open(path, true));
  PS_TRY(read_header(file, &header));
  const int64_t bytes = static_cast<int64_t>(header.metadata_bytes);
  if (!metadata->allocate(bytes + 16)) return fail(PS_OUT_OF_MEMORY, "out of memory");
  PS_TRY(file.read(static_cast<int64_t>(header.metadata_offset), bytes, metadata->data()));
  if (crc32(0, metadata->data(), bytes) != header.metadata_crc32)
    return fail(PS_INVALID_FILE, "header.metadata_crc32: the file is damaged");
  return read_metadata(FlatBuffer{metadata->data(), static_cast<uint32_t>(bytes)}, graph);
}

void add_scheme(const Node& node, Needs* needs) {
  for (int32_t a = 0; a < node.num_attrs; ++a) {
    for (size_t i = 0; i < sizeof(kSchemeNames) / sizeof(*kSchemeNames); ++i) {
      if (equal(node.attrs[a].name, "scheme") && equal(node.attrs[a].s, kSchemeNames[i])) needs->schemes[i] = true;
    }
  }
}

ps_status add_bundle(const char* path, bool chooses_kv, Needs* needs) {
  Region metadata;
  Graph graph;
  const ps_status status = read_graph(path, &metadata, &graph);
  if (status != PS_OK) return prefix(status, "%s: ", path);
  for (const Node& node : graph.nodes) {
    if (node.op >= 0 && node.op < NUM_OPS) needs->ops[node.op] = true;  // else a custom op, loaded at run time
    add_scheme(node, needs);
  }
  for (const Weight& weight : graph.weights) {
    if (weight.layout >= 0 && weight.layout < 64) needs->layouts |= uint64_t{1} << weight.layout;
  }
  needs->networks |= graph.kind == KIND_NETWORK;
  if (!chooses_kv) needs->kv_layouts |= 1u << auto_kv_layout(graph.scheme);
  return PS_OK;
}

ps_status read_kv_layouts(const char* text, Needs* needs) {
  for (const char* p = text; *p;) {
    const size_t size = strcspn(p, ",");
    int32_t found = 0;
    for (int32_t layout = PS_KV_F32; layout <= PS_KV_INT4; ++layout) {
      if (equal(Str{p, static_cast<uint32_t>(size)}, kv_layout_name(layout))) found = layout;
    }
    if (!found)
      return fail(PS_INVALID_ARGUMENT, "PENSTOCK_KV_LAYOUTS: expected f32, bf16, int8 or int4, got %.*s",
                  static_cast<int>(size), p);
    needs->kv_layouts |= 1u << found;
    p += size + (p[size] == ',');
  }
  return PS_OK;
}

ps_status write_header(const char* path, const Needs& needs) {
  FILE* out = fopen(path, "w");
  if (!out) return fail(PS_IO_ERROR, "%s: it cannot be written", path);
  fprintf(out, "// Written by core/tools/generate/bundle_ops.cpp.\n#define PS_BUILD_OPS \"");
  for (int32_t i = 0; i < NUM_OPS; ++i) {
    if (needs.ops[i]) fprintf(out, " %s", kOps[i].name), printf("%s ", kOps[i].name);
  }
  printf("with");
  fprintf(out, " \"\n#define PS_BUILD_SCHEMES \"");
  for (size_t i = 0; i < sizeof(kSchemeNames) / sizeof(*kSchemeNames); ++i) {
    if (needs.schemes[i]) fprintf(out, " %s", kSchemeNames[i]), printf(" %s", kSchemeNames[i]);
  }
  fprintf(out,
          " \"\n#define PS_BUILD_LAYOUTS 0x%llxu\n#define PS_BUILD_KV_LAYOUTS 0x%xu\n#define PS_BUILD_NETWORKS %d\n",
          static_cast<unsigned long long>(needs.layouts), needs.kv_layouts, needs.networks);
  printf("; keys and values");
  for (int32_t layout = PS_KV_F32; layout <= PS_KV_INT4; ++layout) {
    if (needs.kv_layouts >> layout & 1) printf(" %s", kv_layout_name(layout));
  }
  printf("\n");
  return fclose(out) == 0 ? PS_OK : fail(PS_IO_ERROR, "%s: it cannot be written", path);
}

ps_status run(int argc, char** argv) {
  if (argc < 4) return fail(PS_INVALID_ARGUMENT, "usage: bundle_ops OUT.h KV_LAYOUTS BUNDLE...");
  Needs needs{};
  PS_TRY(read_kv_layouts(argv[2], &needs));
  const bool chooses_kv = needs.kv_layouts != 0;
  for (int i = 3; i < argc; ++i) PS_TRY(add_bundle(argv[i], chooses_kv, &needs));
  return write_header(argv[1], needs);
}

}  // namespace
}  // namespace ps

int main(int argc, char** argv) {
  if (ps::run(argc, argv) == PS_OK) return 0;
  fprintf(stderr, "%s\n", ps::error_message());
  return 1;
}
