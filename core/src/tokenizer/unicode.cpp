// UTF-8 decoding, lookup of character classes and case, and normalization forms.
// Hot: runs for every text.
#include "tokenizer/unicode.h"

#include <pthread.h>

#include <algorithm>

#include "tokenizer/unicode_tables.h"

namespace ps {
namespace {

constexpr uint32_t kNumAscii = 128;
constexpr uint32_t kNumLowerRuns = packed::kNumLowerRuns / 4;

// The tables are described in unicode_tables.h.
struct Classes {
  uint32_t class_runs[packed::kNumClassRuns];
  uint32_t trait_runs[packed::kNumTraitRuns];
  uint32_t cluster_runs[packed::kNumClusterRuns];
  uint32_t lower_runs[packed::kNumLowerRuns];
};

struct Forms {
  uint32_t combining_runs[packed::kNumCombiningRuns];
  uint32_t single_runs[packed::kNumSingleRuns];
  uint32_t single_targets[packed::kNumSingleTargets];
  uint16_t pairs[packed::kNumPairs];
  uint16_t pair_order[packed::kNumPairOrder];
  uint32_t large_pairs[packed::kNumLargePairs];
  uint32_t compatible_runs[packed::kNumCompatibleRuns];
  uint16_t compatible_begins[packed::kNumCompatibleBegins];
  uint16_t compatible_texts[packed::kNumCompatibleTexts];
};

// Each value is a difference from the one `stride` places before, modulo 2^32.
template <class T>
__attribute__((noinline, cold)) void unpack(const uint8_t* from, uint32_t stride, T* to, uint32_t size) {
  for (uint32_t i = 0; i < size; ++i) {
    uint32_t number = 0;
    int shift = 0;
    for (; *from & 128; shift += 7) number |= (*from++ & 127u) << shift;
    number |= static_cast<uint32_t>(*from++) << shift;
    const uint32_t difference = number >> 1 ^ (0 - (number & 1));
    to[i] = static_cast<T>((i < stride ? 0 : to[i - stride]) + difference);
  }
}

void unpack(Classes* t) {
  unpack(packed::kClassRuns, 1, t->class_runs, packed::kNumClassRuns);
  unpack(packed::kTraitRuns, 1, t->trait_runs, packed::kNumTraitRuns);
  unpack(packed::kClusterRuns, 1, t->cluster_runs, packed::kNumClusterRuns);
  unpack(packed::kLowerRuns, 4, t->lower_runs, packed::kNumLowerRuns);
}

void unpack(Forms* t) {
  unpack(packed::kCombiningRuns, 1, t->combining_runs, packed::kNumCombiningRuns);
  unpack(packed::kSingleRuns, 2, t->single_runs, packed::kNumSingleRuns);
  unpack(packed::kSingleTargets, 1, t->single_targets, packed::kNumSingleTargets);
  unpack(packed::kPairs, 3, t->pairs, packed::kNumPairs);
  unpack(packed::kPairOrder, 1, t->pair_order, packed::kNumPairOrder);
  unpack(packed::kLargePairs, 4, t->large_pairs, packed::kNumLargePairs);
  unpack(packed::kCompatibleRuns, 2, t->compatible_runs, packed::kNumCompatibleRuns);
  unpack(packed::kCompatibleBegins, 1, t->compatible_begins, packed::kNumCompatibleBegins);
  unpack(packed::kCompatibleTexts, 1, t->compatible_texts, packed::kNumCompatibleTexts);
}

// The tables are unpacked when a text first needs them: as constants they would take 54 kB of the library, and unpacked
// at load time as much memory, even in processes that read only ASCII.
template <class T>
struct Unpacked {
  static T table;
  static bool is_ready;
  static pthread_once_t once;

  static void fill() {
    unpack(&table);
    __atomic_store_n(&is_ready, true, __ATOMIC_RELEASE);
  }

  __attribute__((noinline, cold)) static void wait() { pthread_once(&once, fill); }

  static const T& get() {
    if (!__atomic_load_n(&is_ready, __ATOMIC_ACQUIRE)) wait();
    return table;
  }
};

template <class T>
T Unpacked<T>::table;
template <class T>
bool Unpacked<T>::is_ready;
template <class T>
pthread_once_t Unpacked<T>::once = PTHREAD_ONCE_INIT;

const Classes& classes() { return Unpacked<Classes>::get(); }
const Forms& forms() { return Unpacked<Forms>::get(); }

}  // namespace

uint32_t classes_of(uint32_t code_point) {
  if (code_point < kNumAscii) {
    const uint32_t lower = code_point | 32;
    if (lower - 'a' < 26) return kLetter | kWord;
    if (code_point - '0' < 10) return kNumber | kWord;
    if (code_point == ' ' || code_point - 9 < 5) return kSpace;
    return code_point == '_' ? kWord : 0;
  }
  const Classes& t = classes();
  const uint32_t* run = std::upper_bound(t.class_runs, t.class_runs + packed::kNumClassRuns, code_point << 4 | 15);
  return run[-1] & 15;
}

uint32_t traits_of(uint32_t code_point) {
  const Classes& t = classes();
  const uint32_t* run = std::upper_bound(t.trait_runs, t.trait_runs + packed::kNumTraitRuns, code_point << 8 | 255);
  return run[-1] & 255;
}

uint32_t lower_of(uint32_t code_point) {
  if (code_point < kNumAscii) return code_point - 'A' < 26 ? code_point | 32 : code_point;
  if (code_point == kCapitalDottedI) return 'i';
  const Classes& t = classes();
  uint32_t low = 0, high = kNumLowerRuns;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (t.lower_runs[4 * middle] <= code_point) low = middle + 1;
    else high = middle;
  }
  if (!low) return code_point;
  const uint32_t* run = t.lower_runs + 4 * (low - 1);  // first, last, stride, what is added
  return code_point <= run[1] && (code_point - run[0]) % run[2] == 0 ? code_point + run[3] : code_point;
}

int32_t character_at(Text text, int64_t at, int32_t* bad, bool* cut) {
  const uint8_t first = text.data[at];
  if (bad) *bad = 1;
  if (cut) *cut = false;
  if (first < kNumAscii) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const int32_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  uint8_t low = 0x80, high = 0xBF;  // of the second byte: neither overlong, nor a surrogate, nor beyond U+10FFFF
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  for (int32_t i = 1; i < length; ++i) {
    if (at + i == text.bytes) {
      if (cut) *cut = true;
      return 0;
    }
    const uint8_t byte = text.data[at + i];
    if (byte < low || byte > high) return 0;
    low = 0x80, high = 0xBF;
    if (bad) *bad = i + 1;
  }
  return length;
}

int64_t find_ill_formed(Text text) {
  for (int64_t at = 0; at < text.bytes;) {
    const int32_t length = character_at(text, at);
    if (!length) return at;
    at += length;
  }
  return -1;
}

uint32_t next_character(Text text, int64_t* at) {
  const uint8_t* p = text.data + *at;
  const int32_t length = *p < kNumAscii ? 1 : character_at(text, *at);
  *at += length ? length : 1;
  switch (length) {
    case 2: return (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    case 3: return (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    case 4: return (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
    default: return *p;
  }
}

uint32_t character_before(Text text, int64_t at) {
  int64_t begin = at - 1;
  while (begin > 0 && at - begin < 4 && (text.data[begin] & 0xC0) == 0x80) --begin;
  return next_character(text, &begin);
}

bool push_character(Bytes* out, uint32_t c) {
  if (c < 0x80) return out->push(static_cast<uint8_t>(c));
  const uint8_t last = static_cast<uint8_t>(0x80 | (c & 0x3F));
  if (c < 0x800) return out->push(static_cast<uint8_t>(0xC0 | c >> 6)) && out->push(last);
  const uint8_t middle = static_cast<uint8_t>(0x80 | (c >> 6 & 0x3F));
  if (c < 0x10000) return out->push(static_cast<uint8_t>(0xE0 | c >> 12)) && out->push(middle) && out->push(last);
  return out->push(static_cast<uint8_t>(0xF0 | c >> 18)) && out->push(static_cast<uint8_t>(0x80 | (c >> 12 & 0x3F))) &&
         out->push(middle) && out->push(last);
}

bool push_bytes(Bytes* out, const uint8_t* data, int64_t bytes) {
  const int64_t old = out->size();
  if (!bytes) return true;
  if (!out->resize(old + bytes)) return false;
  memcpy(out->data() + old, data, static_cast<size_t>(bytes));
  return true;
}

namespace {

// How code points join in clusters, as encoded in the table, and the parts of Hangul syllables.
constexpr uint32_t kControl = 1, kJoins = 2, kExtends = 4, kLinker = 8, kConsonant = 16, kPictograph = 32,
                   kPrepended = 64;
constexpr uint32_t kLeadJamo = 256, kVowelJamo = 512, kTrailJamo = 1024, kSyllable = 2048, kFullSyllable = 4096;
constexpr uint32_t kJoiner = 0x200D;

uint32_t hangul_of(uint32_t c) {
  if (c - 0xAC00 < 11172) return (c - 0xAC00) % 28 ? kFullSyllable : kSyllable;
  if (c - 0x1100 < 0x60 || c - 0xA960 < 29) return kLeadJamo;
  if (c - 0x1160 < 0x48 || c - 0xD7B0 < 23) return kVowelJamo;
  return c - 0x11A8 < 0x58 || c - 0xD7CB < 49 ? kTrailJamo : 0;
}

uint32_t cluster_bits(uint32_t c) {
  const Classes& t = classes();
  const uint32_t* run = std::upper_bound(t.cluster_runs, t.cluster_runs + packed::kNumClusterRuns, c << 8 | 255);
  return (run == t.cluster_runs ? 0 : run[-1] & 255) | (c < kNumAscii ? 0 : hangul_of(c));
}

bool joins_hangul(uint32_t before, uint32_t bits) {
  if (before & kLeadJamo) return bits & (kLeadJamo | kVowelJamo | kSyllable | kFullSyllable);
  if (before & (kSyllable | kVowelJamo)) return bits & (kVowelJamo | kTrailJamo);
  return before & (kFullSyllable | kTrailJamo) && bits & kTrailJamo;
}

}  // namespace

int64_t end_of_cluster(Text text, int64_t at) {
  uint32_t before = next_character(text, &at), bits = cluster_bits(before);
  bool pictograph = bits & kPictograph, consonant = bits & kConsonant,
       linked = false;  // whether only marks followed since then
  for (int64_t next = at; next < text.bytes; at = next) {
    const uint32_t c = next_character(text, &next), later = cluster_bits(c);
    if (before == '\r' && c == '\n') return next;
    if ((bits | later) & kControl) return at;
    const bool joined = later & kJoins || bits & kPrepended || joins_hangul(bits, later) ||
                        (later & kConsonant && consonant && linked) ||
                        (later & kPictograph && pictograph && before == kJoiner);
    if (!joined) return at;
    const bool extends = later & kExtends || c == kJoiner;
    pictograph = later & kPictograph || (pictograph && extends && before != kJoiner);
    consonant = later & kConsonant || (consonant && extends);
    linked = extends && (linked || later & kLinker);
    before = c, bits = later;
  }
  return at;
}

namespace {

constexpr uint32_t kNumSingleRuns = packed::kNumSingleRuns / 2;
constexpr uint32_t kNumPairs = packed::kNumPairs / 3;
constexpr uint32_t kNumLargePairs = packed::kNumLargePairs / 4;
constexpr uint32_t kNumCompatibleRuns = packed::kNumCompatibleRuns / 2;
constexpr uint32_t kNumCompatible = packed::kNumCompatibleBegins - 1;
constexpr uint32_t kFirstCombining = 0x300;  // below it, no character composes or has a combining class
constexpr uint32_t kHangul = 0xAC00, kLead = 0x1100, kVowel = 0x1161, kTrail = 0x11A7;
constexpr uint32_t kNumLeads = 19, kNumVowels = 21, kNumTrails = 28;
constexpr uint32_t kNoCharacter = ~0u;

uint32_t combining_class(uint32_t c) {
  if (c < kFirstCombining) return 0;
  const Forms& t = forms();
  const uint32_t* run = std::upper_bound(t.combining_runs, t.combining_runs + packed::kNumCombiningRuns, c << 8 | 255);
  return run == t.combining_runs ? 0 : run[-1] & 255;
}

// One decomposition step of a code point; false: none. *second is kNoCharacter if there is only one.
bool decompose(uint32_t c, uint32_t* first, uint32_t* second) {
  const Forms& t = forms();
  *second = kNoCharacter;
  uint32_t low = 0, high = kNumSingleRuns;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (t.single_runs[2 * middle] <= c) low = middle + 1;
    else high = middle;
  }
  if (low) {
    const uint32_t index = t.single_runs[2 * low - 1] + (c - t.single_runs[2 * low - 2]);
    if (index < (low < kNumSingleRuns ? t.single_runs[2 * low + 1] : packed::kNumSingleTargets)) {
      *first = t.single_targets[index];
      return true;
    }
  }
  low = 0, high = kNumPairs;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (t.pairs[3 * middle] < c) low = middle + 1;
    else high = middle;
  }
  if (low < kNumPairs && t.pairs[3 * low] == c) {
    *first = t.pairs[3 * low + 1], *second = t.pairs[3 * low + 2];
    return true;
  }
  for (uint32_t i = 0; c > 0xFFFF && i < kNumLargePairs; ++i) {
    if (t.large_pairs[4 * i] != c) continue;
    *first = t.large_pairs[4 * i + 1], *second = t.large_pairs[4 * i + 2];
    return true;
  }
  return false;
}

uint32_t compose(uint32_t a, uint32_t b) {
  if (a - kLead < kNumLeads && b - kVowel < kNumVowels)
    return kHangul + ((a - kLead) * kNumVowels + (b - kVowel)) * kNumTrails;
  if (a - kHangul < kNumLeads * kNumVowels * kNumTrails && (a - kHangul) % kNumTrails == 0 &&
      b - kTrail - 1 < kNumTrails - 1)
    return a + (b - kTrail);
  const Forms& t = forms();
  if (a < 0x10000 && b < 0x10000) {
    uint32_t low = 0, high = packed::kNumPairOrder;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      const uint16_t* pair = t.pairs + 3 * t.pair_order[middle];
      if (pair[1] < a || (pair[1] == a && pair[2] < b)) low = middle + 1;
      else high = middle;
    }
    if (low < packed::kNumPairOrder) {
      const uint16_t* pair = t.pairs + 3 * t.pair_order[low];
      if (pair[1] == a && pair[2] == b) return pair[0];
    }
  }
  for (uint32_t i = 0; (a > 0xFFFF || b > 0xFFFF) && i < kNumLargePairs; ++i) {
    const uint32_t* pair = t.large_pairs + 4 * i;
    if (pair[1] == a && pair[2] == b && pair[3]) return pair[0];
  }
  return kNoCharacter;
}

// A starter and the characters after it, in canonical order: class << 56 | position << 24 | code point, sorted in n log
// n for any number of marks.
using Marks = Vec<uint64_t>;

bool push_mark(uint32_t c, Marks* out) {
  return out->push(static_cast<uint64_t>(combining_class(c)) << 56 | static_cast<uint64_t>(out->size()) << 24 | c);
}

// The index of a code point in the compatibility decompositions, or kNumCompatible.
uint32_t find_compatible(uint32_t c) {
  const Forms& t = forms();
  uint32_t low = 0, high = kNumCompatibleRuns;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (t.compatible_runs[2 * middle] <= c) low = middle + 1;
    else high = middle;
  }
  if (!low) return kNumCompatible;
  const uint32_t index = t.compatible_runs[2 * low - 1] + (c - t.compatible_runs[2 * low - 2]);
  return index < (low < kNumCompatibleRuns ? t.compatible_runs[2 * low + 1] : kNumCompatible) ? index : kNumCompatible;
}

bool push_decomposed(uint32_t c, bool compatible, Marks* out) {
  const Forms& t = forms();
  uint32_t first, second;
  const uint32_t wide = compatible ? find_compatible(c) : kNumCompatible;
  if (wide < kNumCompatible) {
    for (uint32_t i = t.compatible_begins[wide]; i < t.compatible_begins[wide + 1]; ++i) {
      if (!push_mark(t.compatible_texts[i], out)) return false;
    }
    return true;
  }
  if (c - kHangul < kNumLeads * kNumVowels * kNumTrails) {
    const uint32_t index = c - kHangul, trail = index % kNumTrails;
    return out->push(kLead + index / (kNumVowels * kNumTrails)) &&
           out->push(kVowel + index / kNumTrails % kNumVowels) && (!trail || out->push(kTrail + trail));
  }
  if (c < kNumAscii || !decompose(c, &first, &second)) return push_mark(c, out);
  // The second one never decomposes further.
  return push_decomposed(first, compatible, out) && (second == kNoCharacter || push_mark(second, out));
}

uint32_t class_of(uint64_t mark) { return static_cast<uint32_t>(mark >> 56); }
uint32_t point_of(uint64_t mark) { return static_cast<uint32_t>(mark & 0xFFFFFF); }

bool push_ordered(Marks* marks, bool composes, Bytes* out) {
  uint64_t* data = marks->data();
  const int64_t size = marks->size();
  for (int64_t begin = 0; begin < size;) {  // sorts runs of marks
    if (!class_of(data[begin])) {
      ++begin;
      continue;
    }
    int64_t end = begin;
    while (end < size && class_of(data[end])) ++end;
    std::sort(data + begin, data + end);
    begin = end;
  }
  int64_t starter = -1;
  uint32_t last = 0;  // class of the previous mark, if one remains between it and the starter
  bool adjacent = false;
  for (int64_t i = 0; composes && i < size; ++i) {
    const uint32_t c = point_of(data[i]), cls = class_of(data[i]);
    if (starter >= 0 && (adjacent || last < cls)) {
      const uint32_t composed = compose(point_of(data[starter]), c);
      if (composed != kNoCharacter) {
        data[starter] = composed;
        data[i] = kNoCharacter;
        continue;
      }
    }
    adjacent = cls == 0;
    if (cls == 0) starter = i;
    last = cls;
  }
  for (int64_t i = 0; i < size; ++i) {
    if (data[i] != kNoCharacter && !push_character(out, point_of(data[i]))) return false;
  }
  marks->clear();
  return true;
}

}  // namespace

bool push_normalized(Text text, uint32_t form, Bytes* out) {
  const bool composes = form & kComposed, compatible = form & kCompatible;
  Marks marks;
  for (int64_t at = 0; at < text.bytes;) {
    // Of two consecutive characters below the first combining one, the first stays as it is.
    int64_t next = at;
    const uint32_t c = next_character(text, &next);
    if (c < (form == kComposed ? kFirstCombining : kNumAscii) && (next == text.bytes || text.data[next] < kNumAscii)) {
      if (marks.size() && !push_ordered(&marks, composes, out)) return false;
      if (!push_bytes(out, text.data + at, next - at)) return false;
      at = next;
      continue;
    }
    // A character below it starts a new sequence: it is never the second of a composition.
    if (c < kFirstCombining && marks.size() && !push_ordered(&marks, composes, out)) return false;
    if (!push_decomposed(c, compatible, &marks)) return false;
    at = next;
  }
  return push_ordered(&marks, composes, out);
}

}  // namespace ps
