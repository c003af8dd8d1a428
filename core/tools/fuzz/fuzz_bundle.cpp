// Mutates bundles and opens them; those that open are planned, run and sampled.  For any bytes, the core must return a
// status and a message: a crash, a hang or a sanitizer report is a failure.
//
//   fuzz_bundle ITERATIONS SEED BUNDLE...
//
// fuzz_bundle 1 SEED+NUMBER reproduces only mutant NUMBER.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "base/size_list.h"
#include "penstock_dev.h"
#include "random.h"
#include "seeds.h"

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kHeader = 64;
constexpr int64_t kMaxMemory = 64 << 20;  // larger plans are valid but take too long
// The first limit is CPU time, so that a stalled machine does not count as a hang.  The second, longer one is wall
// time, for waits without CPU use.
constexpr unsigned kHangSeconds = 40;
constexpr unsigned kWaitSeconds = 600;
constexpr int64_t kReportEvery = 20000;

template <typename T>
T get(const Bytes& b, size_t at) {
  T value;
  memcpy(&value, b.data() + at, sizeof(T));
  return value;
}

template <typename T>
void put(Bytes* b, size_t at, T value) {
  memcpy(b->data() + at, &value, sizeof(T));
}

size_t metadata_size(const Bytes& b) {
  if (b.size() < kHeader) return 0;
  const uint64_t size = get<uint64_t>(b, 24);
  return size < b.size() - kHeader ? static_cast<size_t>(size) : b.size() - kHeader;
}

void fix_checksum(Bytes* b) {
  if (b->size() >= kHeader) put(b, 32, ps_crc32(0, b->data() + kHeader, static_cast<int64_t>(metadata_size(*b))));
}

int64_t interesting(Random* r, int64_t old) {
  static const int64_t values[] = {0,
                                   1,
                                   -1,
                                   2,
                                   3,
                                   4,
                                   7,
                                   8,
                                   16,
                                   31,
                                   32,
                                   63,
                                   64,
                                   127,
                                   128,
                                   255,
                                   256,
                                   4095,
                                   4096,
                                   65535,
                                   65536,
                                   1 << 24,
                                   INT32_MAX,
                                   INT32_MIN,
                                   int64_t{1} << 31,
                                   int64_t{1} << 32,
                                   int64_t{1} << 40,
                                   INT64_MAX,
                                   INT64_MIN,
                                   1000003};
  switch (r->below(4)) {
    case 0: return old + static_cast<int64_t>(r->below(9)) - 4;
    case 1: return static_cast<int64_t>(r->below(64));
    default: return values[r->below(sizeof(values) / sizeof(values[0]))];
  }
}

// Writes a number of `size` bytes at an aligned offset in the metadata.
void edit_number(Bytes* b, Random* r, size_t size) {
  const size_t n = metadata_size(*b);
  if (n < 16) return;
  const size_t at = kHeader + r->below((n - size) / size) * size;
  int64_t old = 0;
  memcpy(&old, b->data() + at, size);
  const int64_t value = interesting(r, old);
  memcpy(b->data() + at, &value, size);
}

void flip_bits(Bytes* b, Random* r, size_t begin, size_t size) {
  for (uint64_t i = 0, n = 1 + r->below(8); i < n && size; ++i)
    (*b)[begin + r->below(size)] ^= static_cast<uint8_t>(1u << r->below(8));
}

void splice(Bytes* b, Random* r, const Bytes& other) {
  const size_t n = metadata_size(*b), m = metadata_size(other);
  if (n < 16 || m < 16) return;
  const size_t length = 4 * (1 + r->below(32));
  const size_t to = 4 * r->below(n / 4), from = 4 * r->below(m / 4);
  for (size_t i = 0; i < length && to + i < n && from + i < m; ++i) (*b)[kHeader + to + i] = other[kHeader + from + i];
}

void resize(Bytes* b, Random* r) {
  const size_t old = b->size();
  b->resize(r->below(2) ? r->below(old + 1) : old + 1 + r->below(10000));
  if (b->size() >= kHeader && r->below(2)) put(b, 40, static_cast<uint64_t>(b->size()));
}

void mutate(Bytes* b, Random* r, const std::vector<Bytes>& seeds) {
  for (uint64_t i = 0, n = 1 + r->below(3); i < n; ++i) {
    switch (r->below(12)) {
      case 0:
      case 1: flip_bits(b, r, kHeader, metadata_size(*b)); break;
      case 2:
      case 3:
      case 4:
      case 5: edit_number(b, r, 4); break;
      case 6:
      case 7: edit_number(b, r, 8); break;
      case 8: edit_number(b, r, 2); break;
      case 9: splice(b, r, seeds[r->below(seeds.size())]); break;
      case 10: resize(b, r); break;
      default: flip_bits(b, r, 0, b->size()); break;  // header and weights too
    }
    if (b->size() < kHeader) return;
  }
  if (r->below(64)) fix_checksum(b);
}

struct Tally {
  int64_t opened = 0, ran = 0, sampled = 0, hidden = 0, tails = 0, predicted = 0, refused[PS_INTERNAL + 1] = {};
  bool expect_message(ps_status status) {
    if (status == PS_OK) return true;
    if (status < 0 || status >= PS_INTERNAL || !*ps_error_message()) {
      fprintf(stderr, "status %d with the message \"%s\"\n", status, ps_error_message());
      return false;
    }
    ++refused[status];
    return true;
  }
};

// Reads every byte, so that a sanitizer detects rows outside the program's memory.
uint32_t touch(const void* rows, size_t num_bytes) { return ps_crc32(0, rows, static_cast<int64_t>(num_bytes)); }

bool says(bool good, const char* what, int64_t found) {
  if (!good) fprintf(stderr, "%s: found %lld\n", what, static_cast<long long>(found));
  return good;
}

// Reads the rows of all tokens if the batch asked for them, and those of the tail if the graph ends in one.
bool read_rows(const ps_program* program, const ps_model_info& info, const ps_batch& batch, Tally* tally) {
  const float *hidden = nullptr, *values = nullptr;
  const int32_t* ids = nullptr;
  int32_t num_tokens = 0, width = 0, num_rows = 0, k = 0;
  ps_status status = ps_program_hidden(program, &hidden, &num_tokens, &width);
  bool ok = tally->expect_message(status);
  ok = says(status != PS_OK || batch.flags & PS_BATCH_HIDDEN, "hidden rows that were not asked for", num_tokens) && ok;
  if (status == PS_OK) {
    ++tally->hidden;
    ok = says(num_tokens == batch.num_tokens && width == info.hidden_size, "hidden rows", num_tokens) && ok;
    touch(hidden, sizeof(float) * static_cast<size_t>(num_tokens) * static_cast<size_t>(width));
  }
  status = ps_program_tail(program, &ids, &values, &num_rows, &k);
  ok = tally->expect_message(status) && ok;
  if (status == PS_OK) {
    ++tally->tails;
    ok = says(num_rows == batch.num_rows && k == info.tail_k, "rows of the tail", num_rows) && ok;
    const size_t count = static_cast<size_t>(num_rows) * static_cast<size_t>(k);
    if (values) touch(values, sizeof(float) * count);
    for (size_t i = 0; i < count; ++i) ok = says(ids[i] < info.vocab_size, "an id of the tail", ids[i]) && ok;
  }
  return ok;
}

bool run_program(ps_model* model, ps_context* context, const ps_model_info& info, Random* r, Tally* tally) {
  ps_program_options options{};
  options.struct_size = sizeof(options);
  options.max_tokens = 8;
  options.max_requests = 2;
  options.max_rows = 4;
  options.num_pages = 8;
  options.num_slots = 2;
  options.kv_layout = 1 + static_cast<int32_t>(r->below(4));
  ps_plan plan{};
  plan.struct_size = sizeof(plan);
  ps_status status = ps_program_plan(model, context, &options, &plan);
  if (status != PS_OK) return tally->expect_message(status);
  if (plan.total_bytes - plan.weight_bytes > kMaxMemory) return true;
  ps_program* program = nullptr;
  status = ps_program_create_flagged(model, context, &options, r->below(2) ? PS_PROGRAM_POISON : 0, &program);
  if (status != PS_OK) return tally->expect_message(status);
  const int32_t ids[] = {0, 0, 0}, positions[] = {0, 1, 0}, starts[] = {0, 2, 3}, rows[] = {1, 2};
  std::vector<int32_t> tables;
  for (int32_t g = 0; g < info.num_page_groups; ++g) tables.insert(tables.end(), {1, 2});
  const int32_t num_rows =
      1 + static_cast<int32_t>(r->below(2));  // one: at most half of the tokens, so that rows are skipped
  const uint32_t flags = r->below(2) ? PS_BATCH_HIDDEN : 0;
  const ps_batch batch{sizeof(ps_batch),    3,    2, num_rows, 1, ids, positions, starts, tables.data(),
                       rows + 2 - num_rows, flags};
  status = ps_program_run(program, &batch);
  bool ok = tally->expect_message(status);
  if (status == PS_OK) {
    ++tally->ran;
    const float temperature[] = {0, static_cast<float>(r->below(2))}, top_p[] = {1, 0.9f};
    const int32_t top_k[] = {0, 3};
    const uint64_t seed[] = {1, 2};
    const int64_t counter[] = {0, 2, 0, 1};
    ps_sampling sampling{};
    sampling.struct_size = sizeof(sampling);
    sampling.num_rows = num_rows;
    sampling.temperature = temperature;
    sampling.top_k = top_k;
    sampling.top_p = top_p;
    sampling.seed = seed;
    sampling.counter = counter;
    int32_t out[2];
    float logprobs[2];
    ps_sampled sampled{};
    sampled.struct_size = sizeof(sampled);
    sampled.ids = out;
    sampled.logprobs = logprobs;
    status = ps_program_sample(program, &sampling, &sampled);  // NaN from damaged weights is refused with a message
    ok = tally->expect_message(status) && ok;
    tally->sampled += status == PS_OK;
    ok = read_rows(program, info, batch, tally) && ok;
  }
  ps_program_destroy(program);
  return ok;
}

size_t element_bytes(int32_t dtype) {
  return dtype == PS_I64 ? 8 : dtype == PS_F32 || dtype == PS_I32 ? 4 : dtype == PS_F16 || dtype == PS_BF16 ? 2 : 1;
}

// The dims of an input at the example sizes; false: too many bytes to be worth the time.
bool input_dims(const ps_value_info& value, const std::vector<ps::NamedSize>& sizes, ps_array* out, size_t* bytes) {
  int64_t dims[ps::kMaxListLen];
  int32_t count = 0;
  const ps::Str text{value.sizes, static_cast<uint32_t>(strlen(value.sizes))};
  const ps::SizeNames names{sizes.data(), static_cast<int32_t>(sizes.size())};
  if (ps::evaluate_sizes(text, names, dims, &count) != PS_OK || count > 6) return false;
  *out = ps_array{nullptr, value.dtype, count, {}};
  *bytes = element_bytes(value.dtype);
  for (int32_t d = 0; d < count; ++d) {
    out->dims[d] = dims[d];
    *bytes *= static_cast<size_t>(dims[d]);
    if (dims[d] < 0 || *bytes > kMaxMemory) return false;
  }
  return true;
}

// Floats from -1 to 1, so that ops select, with a few special values; integers are 0, a valid index of any tensor.
void fill_input(int32_t dtype, Random* r, Bytes* data) {
  static const float odd[] = {0, -0.0f, 3e38f, -3e38f, 1e-45f, INFINITY, -INFINITY, NAN};
  const bool has_odd = r->below(8) == 0;
  for (size_t at = 0; dtype == PS_F32 && at < data->size(); at += sizeof(float))
    put(data, at, has_odd && r->below(8) == 0 ? odd[r->below(8)] : 2 * r->unit() - 1);
  for (size_t at = 0; dtype == PS_BOOL && at < data->size(); ++at) (*data)[at] = static_cast<uint8_t>(r->below(2));
}

// Reads every byte of every output.
bool read_outputs(const ps_program* program, const ps_model_info& info, Tally* tally) {
  bool ok = true;
  for (int32_t i = 0; i < info.num_outputs; ++i) {
    ps_array array;
    const ps_status status = ps_program_output(program, i, &array);
    ok = tally->expect_message(status) && says(status == PS_OK, "an output", i) && ok;
    if (status != PS_OK) continue;
    size_t bytes = element_bytes(array.dtype);
    for (int32_t d = 0; d < array.ndim; ++d) bytes *= static_cast<size_t>(array.dims[d]);
    touch(array.data, bytes);
  }
  return ok;
}

// Runs a general network twice: at its example sizes and at others.
bool run_network(ps_model* model, ps_context* context, const ps_model_info& info, Random* r, Tally* tally) {
  ps_program_options options{};
  options.struct_size = sizeof(options);
  ps_program* program = nullptr;
  ps_status status = ps_program_create_flagged(model, context, &options, r->below(2) ? PS_PROGRAM_POISON : 0, &program);
  if (status != PS_OK) return tally->expect_message(status);
  bool ok = true;
  for (int32_t run = 0; run < 2; ++run) {
    std::vector<ps::NamedSize> sizes;
    for (int32_t i = 0; i < info.num_sizes; ++i) {
      ps_size_info size{};
      size.struct_size = sizeof(size);
      ok = tally->expect_message(ps_model_size(model, i, &size)) && ok;
      const int64_t value = run == 0 ? size.example : size.min + static_cast<int64_t>(r->below(4)) * size.multiple;
      sizes.push_back(ps::NamedSize{ps::Str{size.name, static_cast<uint32_t>(strlen(size.name))}, value});
    }
    std::vector<ps_array> arrays(static_cast<size_t>(info.num_inputs));
    std::vector<Bytes> data(arrays.size());
    bool small = true;
    for (int32_t i = 0; i < info.num_inputs && small; ++i) {
      ps_value_info value{};
      value.struct_size = sizeof(value);
      size_t bytes = 0;
      ok = tally->expect_message(ps_model_input(model, i, &value)) && ok;
      const size_t at = static_cast<size_t>(i);
      small = input_dims(value, sizes, &arrays[at], &bytes);
      data[at].resize(small ? bytes : 0);
      fill_input(value.dtype, r, &data[at]);
      arrays[at].data = data[at].data();
    }
    if (!small) continue;
    status = ps_program_predict(program, arrays.data(), info.num_inputs);
    ok = tally->expect_message(status) && ok;
    if (status != PS_OK) continue;
    ++tally->predicted;
    ok = read_outputs(program, info, tally) && ok;
  }
  ps_program_destroy(program);
  return ok;
}

bool try_mutant(const char* path, ps_context* context, Random* r, Tally* tally) {
  ps_model_options options{};
  options.struct_size = sizeof(options);
  options.verify = r->below(8) == 0;
  options.private_copy = r->below(8) != 0;  // private memory has red zones
  ps_model* model = nullptr;
  const ps_status status = ps_model_open(path, &options, &model);
  if (status != PS_OK) return tally->expect_message(status);
  ++tally->opened;
  ps_model_info info{};
  info.struct_size = sizeof(info);
  bool ok = tally->expect_message(ps_model_describe(model, &info));
  const void* data;
  int64_t bytes;
  ok = tally->expect_message(ps_model_segment(model, "config.json", &data, &bytes)) && ok;
  ok = (info.kind == 1 ? run_network : run_program)(model, context, info, r, tally) && ok;
  ps_model_close(model);
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: fuzz_bundle ITERATIONS SEED BUNDLE...\n");
    return 2;
  }
  const int64_t iterations = atoll(argv[1]);
  const uint64_t seed = strtoull(argv[2], nullptr, 10);
  std::vector<Bytes> seeds;
  if (!read_seeds(argv + 3, argc - 3, kHeader, "bundle", &seeds)) return 2;
  ps_context* contexts[2] = {};
  for (int32_t i = 0; i < 2; ++i) {
    const ps_context_options options{sizeof(ps_context_options), i + 1, nullptr, nullptr};
    if (ps_context_create(&options, &contexts[i]) != PS_OK) {
      fprintf(stderr, "%s\n", ps_error_message());
      return 2;
    }
  }
  const int file = memfd_create("mutant.psm", MFD_CLOEXEC);
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  Tally tally;
  for (int64_t i = 0; i < iterations; ++i) {
    Random random{(seed + static_cast<uint64_t>(i)) * 0xD1342543DE82EF95u};
    Bytes bytes = seeds[random.below(seeds.size())];
    mutate(&bytes, &random, seeds);
    if (file < 0 || ftruncate(file, 0) != 0 ||
        pwrite(file, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
      perror("memfd");
      return 2;
    }
    const itimerval limit{{0, 0}, {kHangSeconds, 0}};
    setitimer(ITIMER_PROF, &limit, nullptr);
    alarm(kWaitSeconds);
    if (!try_mutant(path.c_str(), contexts[random.below(16) == 0], &random, &tally)) {
      fprintf(stderr, "mutant %lld of seed %llu failed\n", static_cast<long long>(i),
              static_cast<unsigned long long>(seed));
      return 1;
    }
    if ((i + 1) % kReportEvery == 0) fprintf(stderr, "%lld mutants\n", static_cast<long long>(i + 1));
  }
  const itimerval off{};
  setitimer(ITIMER_PROF, &off, nullptr);
  alarm(0);
  for (ps_context* context : contexts) ps_context_destroy(context);
  printf("mutants %lld opened %lld ran %lld sampled %lld hidden %lld tails %lld predicted %lld invalid_argument %lld "
         "invalid_file %lld unsupported %lld\n",
         static_cast<long long>(iterations), static_cast<long long>(tally.opened), static_cast<long long>(tally.ran),
         static_cast<long long>(tally.sampled), static_cast<long long>(tally.hidden),
         static_cast<long long>(tally.tails), static_cast<long long>(tally.predicted),
         static_cast<long long>(tally.refused[PS_INVALID_ARGUMENT]),
         static_cast<long long>(tally.refused[PS_INVALID_FILE]), static_cast<long long>(tally.refused[PS_UNSUPPORTED]));
  return 0;
}
