// The reader of generation_config.json, and of the quantization config in config.json.
#include "defaults.h"

#include <stdlib.h>
#include <string.h>

namespace lite {
namespace {

// Finds the value of a key of the outermost object.  Skips strings and nested objects; interprets nothing.
class TopLevel {
 public:
  TopLevel(const char* json, int64_t bytes) : begin_(json), end_(json + bytes) {}

  // The value's first characters, up to a comma, a bracket or the end; false: there is no such key.
  bool find(const char* key, char* out, size_t size) const {
    const char* value = value_of(key);
    if (value) copy(value, out, size);
    return value != nullptr;
  }

  // The object of a key; an empty one if the key is missing or has another type.
  TopLevel object(const char* key) const {
    const char* value = value_of(key);
    if (!value || value >= end_ || *value != '{') value = end_;
    return TopLevel(value, end_ - value);
  }

 private:
  const char* value_of(const char* key) const {
    int depth = 0;
    const size_t key_size = strlen(key);
    for (const char* p = begin_; p < end_; ++p) {
      if (*p == '{' || *p == '[') ++depth;
      if ((*p == '}' || *p == ']') && --depth == 0) return nullptr;  // the end of a nested object
      if (*p != '"') continue;
      const char* text = p + 1;
      p = string_end(text);
      if (depth != 1 || p >= end_ || static_cast<size_t>(p - text) != key_size || memcmp(text, key, key_size) != 0)
        continue;
      const char* value = space_end(p + 1);
      if (value >= end_ || *value != ':') continue;  // a value that equals the key
      return space_end(value + 1);
    }
    return nullptr;
  }
  const char* string_end(const char* p) const {
    while (p < end_ && *p != '"') p += *p == '\\' ? 2 : 1;
    return p < end_ ? p : end_;
  }
  const char* space_end(const char* p) const {
    while (p < end_ && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) ++p;
    return p;
  }
  void copy(const char* p, char* out, size_t size) const {
    size_t n = 0;
    while (p < end_ && n + 1 < size && !strchr(",}] \n\r\t", *p)) out[n++] = *p++;
    out[n] = 0;
  }
  const char *begin_, *end_;
};

double number(const TopLevel& config, const char* key, double absent) {
  char text[64];
  if (!config.find(key, text, sizeof(text))) return absent;
  char* end;
  const double value = strtod(text, &end);
  return end == text || *end ? absent : value;
}

double share(double value) { return value <= 0 ? 1 : value < 1e-6 ? 1e-6 : value; }

}  // namespace

Defaults read_defaults(const char* json, int64_t bytes) {
  Defaults out;
  if (!json || bytes <= 0) return out;
  const TopLevel config(json, bytes);
  char text[8];
  const bool samples = config.find("do_sample", text, sizeof(text)) && strcmp(text, "true") == 0;
  out.repetition_penalty = number(config, "repetition_penalty", 1);
  const double most = number(config, "max_new_tokens", 0);
  if (most >= 1 && most <= INT32_MAX) out.max_tokens = static_cast<int64_t>(most);
  if (!samples) return out;
  out.temperature = number(config, "temperature", 1);
  const double top_k = number(config, "top_k", 50);
  out.top_k = top_k >= 0 && top_k <= INT32_MAX ? static_cast<int64_t>(top_k) : 0;
  out.top_p = share(number(config, "top_p", 1));
  out.typical_p = share(number(config, "typical_p", 1));
  out.min_p = number(config, "min_p", 0);
  return out;
}

const char* stored_kv_cache(const char* json, int64_t bytes) {
  if (!json || bytes <= 0) return "auto";
  const TopLevel recipe = TopLevel(json, bytes).object("quantization_config");
  char text[32];
  if (!recipe.find("quant_method", text, sizeof(text)) || strcmp(text, "\"penstock\"") != 0) return "auto";
  if (!recipe.find("kv_cache", text, sizeof(text)) || strcmp(text, "null") == 0) return "auto";
  static const char* const names[][2] = {
      {"\"auto\"", "auto"}, {"\"f32\"", "f32"}, {"\"bf16\"", "bf16"}, {"\"int8\"", "int8"}, {"\"int4\"", "int4"}};
  for (const auto& name : names)
    if (strcmp(text, name[0]) == 0) return name[1];
  return nullptr;
}

}  // namespace lite
