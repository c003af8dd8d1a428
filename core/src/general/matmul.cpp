// Ops of general networks: matmul.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_matmul(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "matmul: not built yet"); }
Phases matmul_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status matmul_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
