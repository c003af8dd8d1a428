// Ops of general networks: softmax, reduce, arg_reduce, top_k, cumsum.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_softmax(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "softmax: not built yet"); }
Phases softmax_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status softmax_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_reduce(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "reduce: not built yet"); }
Phases reduce_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status reduce_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_arg_reduce(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "arg_reduce: not built yet"); }
Phases arg_reduce_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status arg_reduce_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_top_k(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "top_k: not built yet"); }
Phases top_k_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status top_k_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_cumsum(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "cumsum: not built yet"); }
Phases cumsum_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status cumsum_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
