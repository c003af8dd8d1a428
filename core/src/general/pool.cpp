// Ops of general networks: max_pool, avg_pool.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_max_pool(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "max_pool: not built yet"); }
Phases max_pool_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status max_pool_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_avg_pool(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "avg_pool: not built yet"); }
Phases avg_pool_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status avg_pool_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
