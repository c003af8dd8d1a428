#include "handles.h"

namespace ps {
namespace {

// Slots are taken and left, never moved or freed; more come in chunks.  A slot is a pointer with its kind in the low bits,
// which create_object leaves zero.
constexpr int kSlots = 64;
struct Chunk {
  std::atomic<uintptr_t> slots[kSlots];
  std::atomic<Chunk*> next;
};
Chunk first_chunk;  // static, so all zero

uintptr_t tagged(const void* object, HandleKind kind) {
  return reinterpret_cast<uintptr_t>(object) | static_cast<uintptr_t>(kind);
}

bool exchange(uintptr_t from, uintptr_t to) {
  for (Chunk* chunk = &first_chunk; chunk; chunk = chunk->next.load(std::memory_order_acquire)) {
    for (std::atomic<uintptr_t>& slot : chunk->slots) {
      uintptr_t expected = from;
      if (slot.load(std::memory_order_relaxed) == from && slot.compare_exchange_strong(expected, to)) return true;
    }
  }
  return false;
}

bool add_chunk() {
  Chunk* chunk = static_cast<Chunk*>(calloc(1, sizeof(Chunk)));
  if (!chunk) return false;
  Chunk* last = &first_chunk;
  for (Chunk* none = nullptr; !last->next.compare_exchange_strong(none, chunk); none = nullptr) last = last->next.load();
  return true;
}

}  // namespace

bool add_handle(const void* object, HandleKind kind) {
  while (!exchange(0, tagged(object, kind))) {
    if (!add_chunk()) return false;
  }
  return true;
}

bool remove_handle(const void* object, HandleKind kind) { return exchange(tagged(object, kind), 0); }

bool is_handle(const void* object, HandleKind kind) {
  const uintptr_t wanted = tagged(object, kind);
  for (const Chunk* chunk = &first_chunk; chunk; chunk = chunk->next.load(std::memory_order_acquire)) {
    for (const std::atomic<uintptr_t>& slot : chunk->slots) {
      if (slot.load(std::memory_order_acquire) == wanted) return true;
    }
  }
  return false;
}

ps_status check_handle(const void* object, HandleKind kind, const char* name) {
  static const char* const kinds[] = {"handle", "context", "model", "program", "tokenizer"};
  if (!object) return fail(PS_INVALID_ARGUMENT, "%s: expected a %s, found null", name, kinds[kind]);
  if ((reinterpret_cast<uintptr_t>(object) & 15) == 0 && is_handle(object, kind)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected an open %s, found a closed one or another pointer", name, kinds[kind]);
}

}  // namespace ps
