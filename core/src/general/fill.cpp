// Ops of general networks: fill, iota, sizes.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_fill(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "fill: not built yet"); }
Phases fill_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status fill_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_iota(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "iota: not built yet"); }
Phases iota_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status iota_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_sizes(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "sizes: not built yet"); }
Phases sizes_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status sizes_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
