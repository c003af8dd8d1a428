// The parser of op schemas.  It checks everything, because schemas of custom ops come from users.
#include <string.h>

#include "ops/ops.h"

namespace ps {
namespace {

struct Reader {
  const char* at;
  bool foreign;

  bool take(const char* text) {
    const size_t size = strlen(text);
    if (strncmp(at, text, size) != 0) return false;
    at += size;
    return true;
  }
  Str name() {
    const char* begin = at;
    while ((*at >= 'a' && *at <= 'z') || *at == '_' || (at > begin && *at >= '0' && *at <= '9')) ++at;
    return Str{begin, static_cast<uint32_t>(at - begin)};
  }
  ps_status expected(const char* what) const {
    return fail(PS_INVALID_ARGUMENT, "schema: expected %s, got \"%.20s\"", what, at);
  }
};

bool is_known(const Signature& s, Str name) {
  bool found = false;
  for (int32_t i = 0; i < s.num_arguments; ++i) found |= equal(s.arguments[i].name, name);
  for (int32_t i = 0; i < s.num_attrs; ++i) found |= equal(s.attrs[i].name, name);
  return found;
}

ps_status read_name(Reader* r, const Signature& s, Str* out) {
  if (!r->take(" ")) return r->expected("a space and a name");
  *out = r->name();
  if (out->size == 0 || out->size > 63) return r->expected("a name of up to 63 letters, digits and _");
  return is_known(s, *out) ? fail(PS_INVALID_ARGUMENT, "schema: the name %.*s is there twice", PS_STR(*out)) : PS_OK;
}

ps_status read_argument(Reader* r, Signature* out) {
  Argument argument{};
  if (r->take("Tensor")) {
    argument.kind = OPERAND_VALUE;
  } else if (r->take("Weight")) {
    argument.kind = OPERAND_WEIGHT;
  } else if (!r->foreign && (r->take("State(a!)") || r->take("State"))) {
    argument.kind = OPERAND_STATE;
  } else {
    return r->expected(r->foreign ? "an argument of type Tensor or Weight" : "an argument");
  }
  argument.optional = r->take("?");
  if (out->num_arguments == kMaxOperands)
    return fail(PS_INVALID_ARGUMENT, "schema: expected up to %d arguments", kMaxOperands);
  PS_TRY(read_name(r, *out, &argument.name));
  out->arguments[out->num_arguments++] = argument;
  return PS_OK;
}

ps_status read_attr(Reader* r, Signature* out) {
  AttrRow attr{};
  attr.type = !r->foreign && r->take("int[]") ? ATTR_INTS
              : r->take("int")                ? ATTR_INT
              : r->take("float")              ? ATTR_FLOAT
              : r->take("bool")               ? ATTR_BOOL
              : r->take("str")                ? ATTR_STRING
                                              : 0;
  if (!attr.type) return r->expected("an attribute of type int, float, bool or str");
  if (out->num_attrs == kMaxAttrs) return fail(PS_INVALID_ARGUMENT, "schema: expected up to %d attributes", kMaxAttrs);
  PS_TRY(read_name(r, *out, &attr.name));
  out->attrs[out->num_attrs++] = attr;
  return PS_OK;
}

ps_status read_outputs(Reader* r, Signature* out) {
  if (!r->take(" -> ")) return r->expected("\" -> \" and the outputs");
  if (r->take("()")) return r->foreign ? fail(PS_INVALID_ARGUMENT, "schema: expected an output, got none") : PS_OK;
  const bool several = r->take("(");
  do {
    if (!r->take("Tensor")) return r->expected("an output of type Tensor");
    if (++out->num_outputs > kMaxOutputs)
      return fail(PS_INVALID_ARGUMENT, "schema: expected up to %d outputs", kMaxOutputs);
  } while (several && r->take(", "));
  return !several || r->take(")") ? PS_OK : r->expected("\")\"");
}

}  // namespace

ps_status parse_schema(const char* schema, bool foreign, Signature* out) {
  Reader r{schema, foreign};
  memset(out, 0, sizeof(*out));
  if (!r.take("(")) return r.expected("\"(\"");
  bool attrs = false;
  for (bool more = !r.take(")"); more;) {
    if (!attrs && r.take("*, ")) attrs = true;
    PS_TRY(attrs ? read_attr(&r, out) : read_argument(&r, out));
    more = r.take(", ");
    if (!more && !r.take(")")) return r.expected("\", \" or \")\"");
  }
  PS_TRY(read_outputs(&r, out));
  if (*r.at) return r.expected("its end");
  if (foreign && (!out->num_arguments || out->arguments[0].kind != OPERAND_VALUE || out->arguments[0].optional))
    return fail(PS_INVALID_ARGUMENT, "schema: expected a Tensor that is there as the first argument");
  return PS_OK;
}

}  // namespace ps
