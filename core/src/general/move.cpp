// Ops of general networks: reshape, permute, slice, expand, concat, pad, trilu.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_reshape(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "reshape: not built yet"); }
Phases reshape_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status reshape_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_permute(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "permute: not built yet"); }
Phases permute_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status permute_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_slice(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "slice: not built yet"); }
Phases slice_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status slice_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_expand(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "expand: not built yet"); }
Phases expand_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status expand_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_concat(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "concat: not built yet"); }
Phases concat_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status concat_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_pad(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "pad: not built yet"); }
Phases pad_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status pad_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_trilu(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "trilu: not built yet"); }
Phases trilu_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status trilu_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
