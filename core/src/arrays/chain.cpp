// Ops of general networks: chain.  Elementwise steps over x, block by block, so that intermediate results stay in the
// cache.  Each step is a kernel of unary or binary, so a chain has the same bits as its steps one by one.
//
//   steps = step {";" step}           up to 8, at most 255 characters
//   step  = unary [alpha [beta]]      "hard_swish", "clip 0 6"
//         | binary operand            "mul a": value * a; "add 0.5": value + 0.5
//         | "r" binary operand        "rsub a": a - value
//   operand = "a" ... "e", an input of the op, or a number
// Hot: runs in every step.
#include "arrays/blocks.h"
#include "arrays/kinds.h"
#include "ops/expect.h"

namespace ps {
namespace {

constexpr int32_t kSteps = attr_at(OP_CHAIN, "str steps"), kMaxSteps = 8, kNumInputs = 6, kFirstBinary = 64;
static_assert(NUM_UNARY_KINDS < kFirstBinary && kFirstBinary + 2 * NUM_BINARY_KINDS < 256, "a kind is a byte");

struct Reader {
  const char *at, *end;

  void skip_spaces() {
    while (at < end && *at == ' ') ++at;
  }
  bool is_at_end() const { return at == end || *at == ';'; }
  Str word() {
    skip_spaces();
    const char* begin = at;
    while (!is_at_end() && *at != ' ') ++at;
    return Str{begin, static_cast<uint32_t>(at - begin)};
  }
};

bool take_digits(Str text, uint32_t* at, double* mantissa, int32_t* places) {
  const uint32_t begin = *at;
  for (; *at < text.size && text.data[*at] >= '0' && text.data[*at] <= '9'; ++*at) {
    *mantissa = *mantissa * 10 + (text.data[*at] - '0');
    ++*places;
  }
  return *at > begin;
}

// A decimal number.  Nine digits, enough for a float, are exact.
bool parse_number(Str text, float* out) {
  uint32_t at = 0;
  const bool negative = text.size && text.data[0] == '-';
  if (negative) ++at;
  double mantissa = 0, exponent = 0;
  int32_t whole = 0, fraction = 0, exponent_digits = 0;
  bool digits = take_digits(text, &at, &mantissa, &whole);
  if (at < text.size && text.data[at] == '.') {
    ++at;
    digits = take_digits(text, &at, &mantissa, &fraction) || digits;
  }
  if (digits && at < text.size && text.data[at] == 'e') {
    ++at;
    const bool below = at < text.size && text.data[at] == '-';
    if (at < text.size && (text.data[at] == '-' || text.data[at] == '+')) ++at;
    digits = take_digits(text, &at, &exponent, &exponent_digits);
    if (exponent > 400) exponent = 400;
    if (below) exponent = -exponent;
  }
  if (!digits || at != text.size || exponent_digits > 4) return false;
  int32_t power = static_cast<int32_t>(exponent) - fraction;
  double scale = 1;
  for (int32_t i = power < 0 ? -power : power; i > 0; --i) scale *= 10;
  const double value = power < 0 ? mantissa / scale : mantissa * scale;
  *out = static_cast<float>(negative ? -value : value);
  return *out - *out == 0.f;
}

int32_t operand_index(Str word) {  // -1: not the letter of an operand
  return word.size == 1 && word.data[0] >= 'a' && word.data[0] < 'a' + kNumInputs - 1 ? word.data[0] - 'a' + 1 : -1;
}

int32_t find_step(Str name) {  // the byte that encodes a kind; 0: no kind has this name
  const int32_t unary = find_unary_kind(name);
  if (unary > UNARY_NONE && !is_test(unary)) return unary;
  for (int32_t reversed = 0; reversed < 2; ++reversed) {
    if (reversed && (name.size < 2 || name.data[0] != 'r')) break;
    const int32_t binary = find_binary_kind(reversed ? Str{name.data + 1, name.size - 1} : name);
    if (binary >= 0 && !is_comparison(binary) && !is_bits(binary)) return kFirstBinary + 2 * binary + reversed;
  }
  return 0;
}

// Checks the arguments of a step, which `r` reads next.
ps_status check_step(Reader* r, Str name, int32_t code, const Spec* in) {
  float number;
  for (int32_t i = 0;; ++i) {
    const Str word = r->word();
    const int32_t operand = code >= kFirstBinary ? operand_index(word) : -1;
    if (word.size == 0 && (code < kFirstBinary || i == 1)) return PS_OK;
    if (operand > 0 && in[operand].kind == OPERAND_NONE)
      return fail(PS_INVALID_ARGUMENT, "steps: %.*s has no input %.*s", PS_STR(name), PS_STR(word));
    if (i == (code < kFirstBinary ? 2 : 1) || (operand < 0 && !parse_number(word, &number)))
      return fail(PS_INVALID_ARGUMENT, "steps: expected %s after %.*s, got \"%.*s\"",
                  code < kFirstBinary ? "up to two numbers" : "an input or a number", PS_STR(name), PS_STR(word));
  }
}

// Stores the bytes of the kinds in attribute i, and the offsets of their arguments in the text in f.
ps_status parse_steps(AttrValue* steps, const Spec* in) {
  uint8_t codes[kMaxSteps] = {}, places[kMaxSteps] = {};
  if (steps->s.size > 255)
    return fail(PS_INVALID_ARGUMENT, "steps: expected up to 255 characters, got %u", steps->s.size);
  Reader r{steps->s.data, steps->s.data + steps->s.size};
  for (int32_t i = 0;; ++i) {
    if (i == kMaxSteps) return fail(PS_UNSUPPORTED, "steps: expected up to %d, got more", kMaxSteps);
    const Str name = r.word();
    const int32_t code = find_step(name);
    if (!code) return fail(PS_UNSUPPORTED, "steps: expected an elementwise function, got \"%.*s\"", PS_STR(name));
    codes[i] = static_cast<uint8_t>(code);
    places[i] = static_cast<uint8_t>(r.at - steps->s.data);
    PS_TRY(check_step(&r, name, code, in));
    if (r.at == r.end) break;
    ++r.at;  // ";"
  }
  memcpy(&steps->i, codes, sizeof(codes));
  memcpy(&steps->f, places, sizeof(places));
  return PS_OK;
}

struct Step {
  int32_t kind, operand;  // operand -1: alpha
  bool binary, reversed;
  float alpha, beta;
};

int32_t read_steps(const AttrValue& attr, Step* steps) {
  uint8_t codes[kMaxSteps], places[kMaxSteps];
  memcpy(codes, &attr.i, sizeof(codes));
  memcpy(places, &attr.f, sizeof(places));
  int32_t count = 0;
  for (; count < kMaxSteps && codes[count]; ++count) {
    Step& step = steps[count];
    const int32_t code = codes[count];
    step = Step{code, -1, code >= kFirstBinary, false, 0, 0};
    Reader r{attr.s.data + places[count], attr.s.data + attr.s.size};
    const Str word = r.word();
    if (step.binary) {
      step.kind = (code - kFirstBinary) / 2;
      step.reversed = (code - kFirstBinary) % 2;
      step.operand = operand_index(word);
    }
    if (step.operand < 0 && word.size) {
      parse_number(word, &step.alpha);
      const Str second = r.word();
      if (second.size) parse_number(second, &step.beta);
    }
  }
  return count;
}

void run_step(const Call& c, const Step& step, const float* x, Piece operand, float* y, int64_t n) {
  if (!step.binary) {
    if (is_lanes_unary(step.kind)) return c.kernels->map_unary(step.kind, step.alpha, step.beta, x, y, n);
    return scalar_unary(step.kind, x, y, n);
  }
  const float* other = step.operand < 0 ? &step.alpha : reinterpret_cast<const float*>(operand.data);
  const int64_t other_step = step.operand < 0 ? 0 : operand.step;
  const float *a = step.reversed ? other : x, *b = step.reversed ? x : other;
  const int64_t a_step = step.reversed ? other_step : 1, b_step = step.reversed ? 1 : other_step;
  float_binary(*c.kernels, step.kind, a, a_step, b, b_step, y, n);
}

void run_chain(const Call& c, int64_t begin, int64_t end, int32_t) {
  Step steps[kMaxSteps];
  const int32_t count = read_steps(c.attrs[kSteps], steps);
  // Intermediate values go to `between`: the output may overlap any operand, which a later step may read.
  alignas(64) float buffers[kNumInputs][kBlock], between[kBlock];
  Broadcast plan;
  int32_t operands[kNumInputs] = {};  // as the plan numbers them
  plan.start(c.out[0]);
  for (int32_t i = 1; i < kNumInputs; ++i) {
    if (!c.in[i].data) continue;
    operands[i] = plan.count;
    plan.add(c.in[i]);
  }
  plan.plan();
  const float* x = reinterpret_cast<const float*>(c.in[0].data);
  float* y = reinterpret_cast<float*>(c.out[0].data);
  each_block(plan.total, plan.block(), begin, end, [&](int64_t start, int64_t n) {
    for (int32_t i = 0; i < count; ++i) {
      const int32_t input = steps[i].operand;
      Piece operand{nullptr, 0};
      if (input > 0) operand = plan.piece(operands[input], start, n, reinterpret_cast<uint8_t*>(buffers[input]));
      run_step(c, steps[i], i ? between : x + start, operand, i + 1 == count ? y + start : between, n);
    }
  });
}
constexpr Phase kChain = {.split = SPLIT_ITEMS,
                          .items = element_items,
                          .run = run_chain,
                          .reads_all = operands(0, 1, 2, 3, 4, 5),
                          .writes_outputs = true};

}  // namespace

ps_status infer_chain(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 0, kMaxRank));
  for (int32_t i = 1; i < kNumInputs; ++i) {
    const Spec& s = in[i];
    if (s.kind == OPERAND_NONE) continue;
    bool fits = s.dtype == PS_F32 && s.rank <= in[0].rank;
    for (int32_t d = 0; d < s.rank && fits; ++d)
      fits = s.dims[d].offset == 1 || equal(s.dims[d], in[0].dims[in[0].rank - s.rank + d]);
    if (!fits)
      return fail(PS_INVALID_ARGUMENT, "%c: expected what broadcasts to %s, got %s", 'a' + i - 1, describe(in[0]).text,
                  describe(s).text);
  }
  PS_TRY(parse_steps(&attrs[kSteps], in));
  copy_type(in[0], out);
  return PS_OK;
}
Phases chain_phases(const Call&) { return Phases{&kChain, 1}; }
ps_status chain_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
