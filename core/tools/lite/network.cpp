// Opens a general network, reads its inputs, runs it, and writes or prints its outputs.
#include "network.h"

#include <stdio.h>
#include <string.h>

#include "generate.h"
#include "npy.h"

namespace lite {
namespace {

constexpr int32_t kMaxInputs = 64, kBenchRuns = 20, kShown = 6;

class NetworkRun {
 public:
  NetworkRun(const Options& options, char* message, uint64_t message_bytes)
      : options_(options), message_(message), message_bytes_(message_bytes) {}
  NetworkRun(const NetworkRun&) = delete;
  NetworkRun& operator=(const NetworkRun&) = delete;
  ~NetworkRun() {
    ps_program_destroy(program_);
    ps_model_close(model_);
    ps_context_destroy(context_);
  }

  int run(double start) {
    if (!open()) return 1;
    if (info_.kind != 1) return kNotNetwork;
    const int status = read_inputs();
    if (status) return status;
    ps_program_options options{};
    options.struct_size = sizeof(options);
    if (ps_program_create(model_, context_, &options, &program_) != PS_OK) return failed();
    const double loaded = now();
    if (!predict()) return 1;
    const double first = now();
    if (options_.bench && !bench(loaded - start, first - loaded)) return 1;
    return give_out();
  }

 private:
  int failed() {
    snprintf(message_, message_bytes_, "%s", ps_error_message());
    return 1;
  }
  int wrong(const char* option, const char* expected, const char* found) {
    snprintf(message_, message_bytes_, "%s: expected %s, got %s", option, expected, found);
    return 2;
  }

  bool open() {
    ps_context_options context{};
    context.struct_size = sizeof(context);
    context.num_threads = static_cast<int32_t>(options_.threads);
    if (ps_context_create(&context, &context_) != PS_OK) return !failed();
    for (int64_t i = 0; i < options_.ops.size; ++i) {
      if (ps_ops_load(options_.ops.data[i]) != PS_OK) return !failed();
    }
    ps_model_options model{};
    model.struct_size = sizeof(model);
    model.verify = options_.verify;
    if (ps_model_open(options_.bundle, &model, &model_) != PS_OK) return !failed();
    info_.struct_size = sizeof(info_);
    if (ps_model_describe(model_, &info_) != PS_OK) return !failed();
    return !options_.huge || ps_model_load_huge(model_, context_) == PS_OK || !failed();
  }

  // The index of the value named in "NAME=FILE", or `index` without a name; *path is the file.
  int find(const char* argument, bool is_input, int32_t index, const char** path) {
    const int32_t count = is_input ? info_.num_inputs : info_.num_outputs;
    const char* const equals = strchr(argument, '=');
    *path = equals ? equals + 1 : argument;
    for (int32_t i = 0; i < count; ++i) {
      ps_value_info value{};
      value.struct_size = sizeof(value);
      if (!describe(is_input, i, &value)) return -1;
      const size_t size = strlen(value.name);
      if (equals ? size == static_cast<size_t>(equals - argument) && memcmp(value.name, argument, size) == 0
                 : i == index)
        return i;
    }
    return -1;
  }

  bool describe(bool is_input, int32_t index, ps_value_info* out) {
    out->struct_size = sizeof(*out);
    return (is_input ? ps_model_input(model_, index, out) : ps_model_output(model_, index, out)) == PS_OK;
  }

  int read_inputs() {
    for (int64_t i = 0; i < options_.inputs.size; ++i) {
      const char* path;
      const int32_t index = find(options_.inputs.data[i], true, static_cast<int32_t>(i), &path);
      if (index < 0) return wrong("--input", "NAME=FILE.npy of an input", options_.inputs.data[i]);
      ps_value_info value{};
      if (!describe(true, index, &value)) return failed();
      inputs_[index].array = ps_array{};
      if (!read_npy(path, value.dtype, &inputs_[index], message_, message_bytes_)) return 1;
      given_[index] = true;
    }
    for (int32_t i = 0; i < info_.num_inputs; ++i) {
      ps_value_info value{};
      if (!describe(true, i, &value)) return failed();
      if (given_[i]) continue;
      snprintf(message_, message_bytes_,
               "--input: expected %s=FILE.npy, of the type %s and the shape [%s], got nothing", value.name,
               npy_type(value.dtype), value.sizes);
      return 2;
    }
    return 0;
  }

  bool predict() {
    ps_array arrays[kMaxInputs];
    for (int32_t i = 0; i < info_.num_inputs; ++i) arrays[i] = inputs_[i].array;
    return ps_program_predict(program_, arrays, info_.num_inputs) == PS_OK || !failed();
  }

  bool bench(double load_s, double first_s) {
    double best = first_s;
    for (int i = 0; i < kBenchRuns && !interrupted; ++i) {
      const double begin = now();
      if (!predict()) return false;
      const double took = now() - begin;
      best = took < best ? took : best;
    }
    fprintf(stderr, "load %.1f ms, first run %.2f ms, best of %d runs %.2f ms, %d thread%s\n", load_s * 1e3,
            first_s * 1e3, kBenchRuns, best * 1e3, ps_context_num_threads(context_),
            ps_context_num_threads(context_) == 1 ? "" : "s");
    return true;
  }

  static void print_element(const ps_array& array, int64_t i) {
    const char* const data = static_cast<const char*>(array.data);
    float f;
    int32_t n;
    int64_t wide;
    switch (array.dtype) {
      case PS_F32: memcpy(&f, data + 4 * i, 4), printf(" %.6g", static_cast<double>(f)); break;
      case PS_I32: memcpy(&n, data + 4 * i, 4), printf(" %d", n); break;
      case PS_I64: memcpy(&wide, data + 8 * i, 8), printf(" %lld", static_cast<long long>(wide)); break;
      case PS_I8: printf(" %d", static_cast<signed char>(data[i])); break;
      case PS_U8:
      case PS_BOOL: printf(" %d", static_cast<unsigned char>(data[i])); break;
      default: printf(" ."); break;
    }
  }

  // Prints one line: name, type, shape and the first elements.
  void print(const ps_value_info& value, const ps_array& array) {
    int64_t count = 1;
    printf("%s %s [", value.name, npy_type(array.dtype));
    for (int32_t d = 0; d < array.ndim; ++d) {
      printf("%s%lld", d ? ", " : "", static_cast<long long>(array.dims[d]));
      count *= array.dims[d];
    }
    printf("]:");
    for (int64_t i = 0; i < count && i < kShown; ++i) print_element(array, i);
    printf(count > kShown ? " ...\n" : "\n");
  }

  int give_out() {
    for (int64_t i = 0; i < options_.outputs.size; ++i) {
      const char* path;
      const int32_t index = find(options_.outputs.data[i], false, static_cast<int32_t>(i), &path);
      ps_array array;
      if (index < 0) return wrong("--output", "NAME=FILE.npy of an output", options_.outputs.data[i]);
      if (ps_program_output(program_, index, &array) != PS_OK) return failed();
      if (!write_npy(path, array, message_, message_bytes_)) return 1;
    }
    for (int32_t i = 0; i < info_.num_outputs && !options_.outputs.size; ++i) {
      ps_value_info value{};
      ps_array array;
      if (!describe(false, i, &value) || ps_program_output(program_, i, &array) != PS_OK) return failed();
      print(value, array);
    }
    if (fflush(stdout) == 0) return 0;
    snprintf(message_, message_bytes_, "standard output cannot be written");
    return 1;
  }

  const Options& options_;
  char* const message_;
  const uint64_t message_bytes_;
  ps_context* context_ = nullptr;
  ps_model* model_ = nullptr;
  ps_program* program_ = nullptr;
  ps_model_info info_{};
  Npy inputs_[kMaxInputs];
  bool given_[kMaxInputs] = {};
};

}  // namespace

int run_network(const Options& options, double start, char* message, uint64_t message_bytes) {
  return NetworkRun(options, message, message_bytes).run(start);
}

}  // namespace lite
