// C++ errors arrive as the classes of tenure/errors.py, which Python owns so that they can have
// several bases and documentation.
#include <tenure/store/errors.h>

#include "bindings.h"
#include <tenure/core/error.h>

namespace py = pybind11;

namespace {

void raise_as(const char* name, const std::exception& error) {
  py::set_error(py::module_::import("tenure.errors").attr(name), error.what());
}

void translate(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (const tenure::UseAfterRelease& error) {
    raise_as("UseAfterRelease", error);
  } catch (const tenure::ReleaseError& error) {
    raise_as("ReleaseError", error);
  } catch (const tenure::ScopeError& error) {
    raise_as("ScopeError", error);
  } catch (const tenure::CollectiveError& error) {
    raise_as("CollectiveError", error);
  } catch (const tenure::LeaseError& error) {
    raise_as("LeaseError", error);
  } catch (const tenure::MutationError& error) {
    raise_as("MutationError", error);
  } catch (const tenure::BudgetError& error) {
    raise_as("BudgetError", error);
  } catch (const tenure::InputError& error) {
    raise_as("InputError", error);
  } catch (const tenure::store::StaleHandle& error) {
    raise_as("StaleHandle", error);
  } catch (const tenure::store::OwnerLost& error) {
    raise_as("OwnerLost", error);
  } catch (const tenure::store::StoreTimeout& error) {
    raise_as("StoreTimeout", error);
  } catch (const tenure::store::AccessRefused& error) {
    raise_as("AccessRefused", error);
  } catch (const tenure::Error& error) {
    raise_as("TenureError", error);
  }
}

}  // namespace

void bind_errors(py::module_& /*m*/) { py::register_local_exception_translator(translate); }
