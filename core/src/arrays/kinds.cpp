// The kinds of elementwise ops by name.
#include "arrays/kinds.h"

namespace ps {
namespace {

enum KindClass : uint8_t { CLASS_LANES, CLASS_SCALAR, CLASS_TEST, CLASS_BITS };
struct KindRow {
  char name[18];
  KindClass class_;
};

constexpr KindRow kUnary[NUM_UNARY_KINDS] = {
#define PS_LANES(id, name) {#name, CLASS_LANES},
#define PS_SCALAR(id, name) {#name, CLASS_SCALAR},
#define PS_TEST(id, name) {#name, CLASS_TEST},
#include "base/unary_kinds.inc"
};
constexpr KindRow kBinary[NUM_BINARY_KINDS] = {
#define PS_LANES(id, name) {#name, CLASS_LANES},
#define PS_SCALAR(id, name) {#name, CLASS_SCALAR},
#define PS_COMPARE(id, name) {#name, CLASS_TEST},
#define PS_BITS(id, name) {#name, CLASS_BITS},
#include "base/binary_kinds.inc"
};

int32_t find(const KindRow* rows, int32_t count, Str name) {
  for (int32_t i = 0; i < count; ++i) {
    if (equal(name, rows[i].name)) return i;
  }
  return -1;
}

}  // namespace

int32_t find_unary_kind(Str name) { return find(kUnary, NUM_UNARY_KINDS, name); }
int32_t find_binary_kind(Str name) { return find(kBinary, NUM_BINARY_KINDS, name); }
bool is_lanes_unary(int32_t kind) { return kUnary[kind].class_ == CLASS_LANES; }
bool is_lanes_binary(int32_t kind) { return kBinary[kind].class_ == CLASS_LANES; }
bool is_test(int32_t kind) { return kUnary[kind].class_ == CLASS_TEST; }
bool is_comparison(int32_t kind) { return kBinary[kind].class_ == CLASS_TEST; }
bool is_bits(int32_t kind) { return kBinary[kind].class_ == CLASS_BITS; }

ps_status parse_activation(AttrValue* act) {
  act->i = find_unary_kind(act->s);
  if (act->i >= 0 && is_lanes_unary(static_cast<int32_t>(act->i))) return PS_OK;
  return fail(PS_UNSUPPORTED, "act: expected none or an activation such as relu, got \"%.*s\"", PS_STR(act->s));
}

}  // namespace ps
