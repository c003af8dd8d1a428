// The table of open handles.
// Hot: runs for every call.
#include "base/handles.h"

namespace ps {
namespace {

// A handle is a token, not an address: its kind, its slot, and a number that is never used again.  The low bits of a
// token differ from those of any pointer to an object.  Reusing a slot gives another token, so a closed handle stays
// closed.
static_assert(sizeof(uintptr_t) == 8, "tokens take 64 bits");
constexpr int kKindBits = 3, kSlotBits = 20, kSlots = 64;
constexpr uintptr_t kFree = 0, kChanging = uintptr_t{1} << kKindBits;  // neither has a kind
constexpr int64_t kMaxSlots = int64_t{1} << kSlotBits;

// Slots are reused but never moved or freed; new ones are allocated in chunks.
struct Slot {
  std::atomic<uintptr_t> token;
  std::atomic<void*> object;
};
struct Chunk {
  Slot slots[kSlots];
  std::atomic<Chunk*> next;
};
Chunk first_chunk;  // static, so all zero
std::atomic<uintptr_t> last_number;

Slot* slot_at(int64_t index) {
  Chunk* chunk = &first_chunk;
  for (; chunk && index >= kSlots; index -= kSlots) chunk = chunk->next.load(std::memory_order_acquire);
  return chunk ? &chunk->slots[index] : nullptr;
}

bool add_chunk() {
  Chunk* chunk = static_cast<Chunk*>(calloc(1, sizeof(Chunk)));
  if (!chunk) return false;
  Chunk* last = &first_chunk;
  for (Chunk* none = nullptr; !last->next.compare_exchange_strong(none, chunk); none = nullptr)
    last = last->next.load();
  return true;
}

Slot* slot_of(uintptr_t token, HandleKind kind) {
  if ((token & ((uintptr_t{1} << kKindBits) - 1)) != static_cast<uintptr_t>(kind)) return nullptr;
  return slot_at(static_cast<int64_t>(token >> kKindBits) & (kMaxSlots - 1));
}

}  // namespace

uintptr_t add_handle(void* object, HandleKind kind) {
  for (int64_t index = 0; index < kMaxSlots; ++index) {
    Slot* slot = slot_at(index);
    if (!slot && (!add_chunk() || !(slot = slot_at(index)))) return 0;
    uintptr_t expected = kFree;
    if (slot->token.load(std::memory_order_relaxed) != kFree ||
        !slot->token.compare_exchange_strong(expected, kChanging))
      continue;
    slot->object.store(object, std::memory_order_relaxed);
    const uintptr_t number = last_number.fetch_add(1, std::memory_order_relaxed) + 1;
    const uintptr_t token =
        ((number << kSlotBits | static_cast<uintptr_t>(index)) << kKindBits) | static_cast<uintptr_t>(kind);
    slot->token.store(token, std::memory_order_release);
    return token;
  }
  return 0;
}

void* remove_handle(uintptr_t token, HandleKind kind) {
  Slot* slot = slot_of(token, kind);
  uintptr_t expected = token;
  if (!slot || !slot->token.compare_exchange_strong(expected, kChanging)) return nullptr;
  void* object = slot->object.load(std::memory_order_relaxed);
  slot->token.store(kFree, std::memory_order_release);
  return object;
}

ps_status find_handle(uintptr_t token, HandleKind kind, const char* name, void** out) {
  static const char* const kinds[] = {"handle", "context", "model", "program", "tokenizer"};
  if (!token) return fail(PS_INVALID_ARGUMENT, "%s: expected a %s, got null", name, kinds[kind]);
  const Slot* slot = slot_of(token, kind);
  if (slot && slot->token.load(std::memory_order_acquire) == token) {
    *out = slot->object.load(std::memory_order_relaxed);
    return PS_OK;
  }
  return fail(PS_INVALID_ARGUMENT, "%s: expected an open %s, got a closed one or another pointer", name, kinds[kind]);
}

}  // namespace ps
