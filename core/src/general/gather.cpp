// Ops of general networks: gather, gather_elements, gather_nd, scatter_elements, scatter_nd.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_gather(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "gather: not built yet"); }
Phases gather_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status gather_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_gather_elements(const Spec*, AttrValue*, Spec*) {
  return fail(PS_UNSUPPORTED, "gather_elements: not built yet");
}
Phases gather_elements_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status gather_elements_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_gather_nd(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "gather_nd: not built yet"); }
Phases gather_nd_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status gather_nd_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_scatter_elements(const Spec*, AttrValue*, Spec*) {
  return fail(PS_UNSUPPORTED, "scatter_elements: not built yet");
}
Phases scatter_elements_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status scatter_elements_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_scatter_nd(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "scatter_nd: not built yet"); }
Phases scatter_nd_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status scatter_nd_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
