// The parser of lists of sizes.  It checks everything, because the text comes from files.
#include "base/size_list.h"

#include <string.h>

namespace ps {
namespace {

constexpr int64_t kMaxNumber = int64_t{1} << 62;
constexpr int32_t kMaxDepth = 32;

uint32_t name_size(const char* begin, const char* end) {
  const char* at = begin;
  while (at < end && ((*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') || *at == '_' ||
                      (at > begin && *at >= '0' && *at <= '9'))) {
    ++at;
  }
  return static_cast<uint32_t>(at - begin);
}

class SizeParser {
 public:
  SizeParser(Str text, const SizeNames& names)
      : at_(text.data), end_(text.data + text.size), text_(text), names_(names) {}

  ps_status read_list(int64_t* out, int32_t* count) {
    *count = 0;
    if (at_ == end_) return PS_OK;
    do {
      if (*count == kMaxListLen) return refused("at most 16 numbers");
      PS_TRY(read_sum(&out[(*count)++], 0));
    } while (take(","));
    return at_ == end_ ? PS_OK : refused("a list of sizes");
  }

 private:
  bool take(const char* token) {
    const int64_t size = static_cast<int64_t>(strlen(token));
    if (end_ - at_ < size || memcmp(at_, token, static_cast<size_t>(size)) != 0) return false;
    at_ += size;
    return true;
  }

  ps_status refused(const char* expected) const {
    return fail(PS_INVALID_ARGUMENT, "expected %s, got \"%.*s\" at character %lld", expected, PS_STR(text_),
                static_cast<long long>(at_ - text_.data));
  }

  ps_status check(int64_t n, bool overflowed, int64_t* out) const {
    if (overflowed || n > kMaxNumber || n < -kMaxNumber) return refused("numbers below 2^62");
    *out = n;
    return PS_OK;
  }

  ps_status read_sum(int64_t* out, int32_t depth) {
    PS_TRY(read_product(out, depth));
    for (;;) {
      const bool plus = take("+");
      if (!plus && !take("-")) return PS_OK;
      int64_t right, result;
      PS_TRY(read_product(&right, depth));
      const bool overflowed = __builtin_add_overflow(*out, plus ? right : -right, &result);
      PS_TRY(check(result, overflowed, out));
    }
  }

  ps_status read_product(int64_t* out, int32_t depth) {
    PS_TRY(read_factor(out, depth));
    for (;;) {
      const bool divides = take("//"), remains = !divides && take("%");
      if (!divides && !remains && !take("*")) return PS_OK;
      int64_t right, result;
      PS_TRY(read_factor(&right, depth));
      if (!divides && !remains) {
        const bool overflowed = __builtin_mul_overflow(*out, right, &result);
        PS_TRY(check(result, overflowed, out));
        continue;
      }
      if (right < 1) return refused("a divisor of 1 or more");
      const int64_t remainder = (*out % right + right) % right;
      *out = divides ? (*out - remainder) / right : remainder;
    }
  }

  ps_status read_pair(int64_t* a, int64_t* b, int32_t depth) {
    PS_TRY(read_sum(a, depth + 1));
    if (!take(",")) return refused("a comma");
    PS_TRY(read_sum(b, depth + 1));
    return take(")") ? PS_OK : refused("\")\"");
  }

  ps_status read_factor(int64_t* out, int32_t depth) {
    if (depth > kMaxDepth) return refused("at most 32 levels of parentheses");
    if (take("-")) {
      PS_TRY(read_factor(out, depth + 1));
      *out = -*out;
      return PS_OK;
    }
    if (take("(")) {
      PS_TRY(read_sum(out, depth + 1));
      return take(")") ? PS_OK : refused("\")\"");
    }
    int64_t a, b;
    if (take("max(")) {
      PS_TRY(read_pair(&a, &b, depth));
      *out = a > b ? a : b;
      return PS_OK;
    }
    if (take("min(")) {
      PS_TRY(read_pair(&a, &b, depth));
      *out = a < b ? a : b;
      return PS_OK;
    }
    return at_ < end_ && *at_ >= '0' && *at_ <= '9' ? read_number(out) : read_name(out);
  }

  ps_status read_number(int64_t* out) {
    *out = 0;
    for (; at_ < end_ && *at_ >= '0' && *at_ <= '9'; ++at_) {
      int64_t result;
      const bool overflowed = __builtin_mul_overflow(*out, int64_t{10}, &result) ||
                              __builtin_add_overflow(result, int64_t{*at_ - '0'}, &result);
      PS_TRY(check(result, overflowed, out));
    }
    return PS_OK;
  }

  ps_status read_name(int64_t* out) {
    const char* const begin = at_;
    const Str name{begin, name_size(at_, end_)};
    at_ += name.size;
    for (int32_t i = 0; name.size && i < names_.count; ++i) {
      if (names_.items[i].name.size != name.size || memcmp(names_.items[i].name.data, name.data, name.size) != 0)
        continue;
      *out = names_.items[i].value;
      return PS_OK;
    }
    at_ = begin;
    return refused("a number or a declared size");
  }

  const char* at_;
  const char* const end_;
  const Str text_;
  const SizeNames& names_;
};

}  // namespace

ps_status evaluate_sizes(Str text, const SizeNames& names, int64_t* out, int32_t* count) {
  return SizeParser(text, names).read_list(out, count);
}

ps_status split_sizes(Str text, Str* out, int32_t* count) {
  *count = 0;
  int32_t depth = 0;
  const char *begin = text.data, *const end = text.data + text.size;
  for (const char* at = begin; text.size && at <= end; ++at) {
    if (at < end && (*at != ',' || depth > 0)) {
      depth += *at == '(' ? 1 : *at == ')' ? -1 : 0;
      continue;
    }
    if (*count == kMaxListLen) return fail(PS_INVALID_ARGUMENT, "expected at most %d sizes", kMaxListLen);
    out[(*count)++] = Str{begin, static_cast<uint32_t>(at - begin)};
    begin = at + 1;
  }
  return PS_OK;
}

uint64_t sizes_used(Str expression, const SizeNames& names) {
  uint64_t used = 0;
  const char* const end = expression.data + expression.size;
  for (const char* at = expression.data; at < end;) {
    const Str name{at, name_size(at, end)};
    for (int32_t i = 0; name.size && i < names.count; ++i) used |= uint64_t{equal(names.items[i].name, name)} << i;
    at += name.size ? name.size : 1;
  }
  return used;
}

}  // namespace ps
