#include "bindings.h"
#include "store.h"
#include "telemetry.h"
#include <tenure/core/storage_ref.h>

PYBIND11_MODULE(_C, m) {
  pybind11::module_::import("torch");
  bind_errors(m);
  bind_clock(m);
  bind_scopes(m);
  bind_storage(m);
  bind_leases(m);
  bind_ledger(m);
  bind_sample(m);
  bind_inspect(m);
  bind_references(m);
  bind_offload(m);
  bind_shard(m);
  bind_pipeline(m);
  bind_ring(m);
  bind_flight(m);
  bind_telemetry(m);
  bind_store(m);
  bind_train(m);
  bind_trainer(m);
  // Called when the interpreter has ended: deleters that need it must not run after this.
  Py_AtExit([] { tenure::forget_storages_from_now_on(); });
}
