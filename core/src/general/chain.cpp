// Ops of general networks: chain.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_chain(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "chain: not built yet"); }
Phases chain_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status chain_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
