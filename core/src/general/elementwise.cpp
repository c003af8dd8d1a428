// Ops of general networks: unary, binary, where, cast.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_unary(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "unary: not built yet"); }
Phases unary_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status unary_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_binary(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "binary: not built yet"); }
Phases binary_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status binary_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_where(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "where: not built yet"); }
Phases where_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status where_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_cast(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "cast: not built yet"); }
Phases cast_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status cast_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
