// Ops of general networks: sdpa.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_sdpa(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "sdpa: not built yet"); }
Phases sdpa_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status sdpa_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
