// Ops of general networks: resize.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_resize(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "resize: not built yet"); }
Phases resize_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status resize_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
