// Builds the graph of references of this process: Python objects, running frames, tensors, autograd
// nodes, storages. Runs with the GIL held; other threads of Python wait, so nothing of Python's
// changes meanwhile. See Note [When it is safe to look].
#include "bindings.h"
#include "frames.h"
#include "saved_tensors.h"
#include <tenure/core/ledger.h>
#include <tenure/core/owner.h>
#include <tenure/inspect/dominators.h>
#include <tenure/inspect/graph.h>
#include <tenure/inspect/observer.h>

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace py = pybind11;
using tenure::inspect::Graph;
using tenure::inspect::NodeKind;
using torch::autograd::Node;

namespace {

// torch does not export the type information of its Python hooks, so they are told by name.
template <class Wanted, class Base>
const Wanted* as(const Base& object, const char* mangled) {
  return std::strcmp(typeid(object).name(), mangled) == 0 ? static_cast<const Wanted*>(&object)
                                                          : nullptr;
}
constexpr const char* kTensorPreHook = "N5torch8autograd23PyFunctionTensorPreHookE";
constexpr const char* kPreHook = "N5torch8autograd17PyFunctionPreHookE";
constexpr const char* kPostHook = "N5torch8autograd18PyFunctionPostHookE";
constexpr const char* kPostAccumulateHooks = "N5torch8autograd32PyFunctionTensorPostAccGradHooksE";
constexpr const char* kPyNode = "N5torch8autograd6PyNodeE";

// 0 for the storage of a fake tensor whose size is a symbol.
size_t bytes_of(const c10::StorageImpl& storage) {
  const auto bytes = storage.sym_nbytes().maybe_as_int();
  return bytes ? static_cast<size_t>(*bytes) : 0;
}

// Objects may not go while they are looked at.
struct NoCollections {
  NoCollections() = default;
  ~NoCollections() {
    if (were_on) {
      PyGC_Enable();
    }
  }
  NoCollections(const NoCollections&) = delete;
  NoCollections& operator=(const NoCollections&) = delete;
  const bool were_on = PyGC_Disable() != 0;
};

// Note [When it is safe to look]
// The GIL keeps Python still, not C++: a thread inside backward() changes the graph without it. The
// watcher therefore builds the graph on the training thread itself, between two steps, or through a
// pending call between two bytecodes of the main thread.
class References {
 public:
  // `skip` are objects that are not followed: the watcher's own.
  explicit References(const py::list& skip) : ndarray_(numpy_array_type()) {
    skipped_.insert(skip.ptr());
    for (const auto& object : skip) {
      skipped_.insert(object.ptr());
    }
    const NoCollections still;
    add_roots();
    expand();
    graph_.begin_loose();
    add_loose();
    expand();
    find_garbage();
  }

  uint32_t size() const { return graph_.size(); }
  size_t references() const { return graph_.references(); }

  // The storages that were found: memory's address and size, node, whether a root reaches it, and
  // the address of the storage itself.
  py::list storages() const {
    py::list out;
    for (const auto node : storages_) {
      const auto* storage = storage_at(node);
      out.append(py::make_tuple(reinterpret_cast<uintptr_t>(storage->data()), bytes_of(*storage),
                                node, graph_.reached(node), reinterpret_cast<uintptr_t>(storage)));
    }
    return out;
  }

  // Storages that were there before watching began are watched from now on.
  size_t adopt() const {
    size_t adopted = 0;
    for (const auto node : storages_) {
      auto* storage = static_cast<c10::StorageImpl*>(const_cast<void*>(graph_.object(node)));
      adopted += tenure::inspect::observer().adopt(*storage) ? 1 : 0;
    }
    return adopted;
  }

  // References to the storage: found, and in truth.
  std::pair<uint32_t, size_t> counts(uint32_t node) const {
    auto* storage = const_cast<c10::StorageImpl*>(storage_at(node));
    return {graph_.referrers(node), c10::raw::intrusive_ptr::use_count(storage)};
  }

  // Whether a root reaches it, the way, the cycle, and whether Python's collector can free that.
  py::tuple retention(uint32_t node) const {
    const auto found = graph_.retention(node);
    const bool free = collectable(found.cycle);
    return py::make_tuple(found.reached, describe(found.path), describe(found.cycle), free);
  }

  // How many different labels lie behind each element of the path to `node`.
  std::vector<uint32_t> labels_behind(uint32_t node, const std::vector<uint32_t>& nodes,
                                      const std::vector<uint64_t>& labels) const {
    return graph_.labels_behind(graph_.retention(node).path, nodes, labels);
  }

  // For each element of the way to `node`: the bytes that would go with it.
  std::vector<uint64_t> gone_with(uint32_t node) const {
    if (gone_.empty()) {
      gone_ = tenure::inspect::gone_with(graph_.dominators(), weights());
    }
    std::vector<uint64_t> out;
    for (const auto element : graph_.retention(node).path) {
      out.push_back(element < gone_.size() ? gone_[element] : 0);
    }
    return out;
  }

  // For each element of the way to `node`: whether the way's own reference to it is the only one,
  // and every way to the node leads through it, so that both would go with that reference.
  std::vector<bool> goes_with_reference(uint32_t node) const {
    const auto path = graph_.retention(node).path;
    const auto references = graph_.references_from_outside(path);
    std::vector<bool> out;
    for (size_t i = 0; i < path.size(); ++i) {
      out.push_back(graph_.reached(node) && references[i] == 1 && graph_.dominates(path[i], node));
    }
    return out;
  }

  // The cycles that no root holds: elements of one way around, bytes that they keep, whether
  // Python's collector can free them.
  py::list cycles(size_t most) const {
    py::list out;
    for (const auto& [nodes, bytes] : graph_.cycles(weights(), most)) {
      const bool free = collectable(nodes);
      out.append(py::make_tuple(describe(nodes), bytes, free));
    }
    return out;
  }

  // Storages that a root reaches, by what the way to them begins with: bytes, count, one of them.
  std::vector<std::tuple<uint64_t, uint32_t, uint32_t>> by_beginning() const {
    const auto beginnings = graph_.beginnings();
    std::map<uint32_t, std::tuple<uint64_t, uint32_t, uint32_t>> sums;
    for (const auto node : storages_) {
      if (graph_.reached(node)) {
        auto& [bytes, count, example] = sums[beginnings[node]];
        bytes += bytes_of(*storage_at(node));
        ++count;
        example = node;
      }
    }
    std::vector<std::tuple<uint64_t, uint32_t, uint32_t>> out;
    for (const auto& [beginning, sum] : sums) {
      out.push_back(sum);
    }
    return out;
  }

  std::vector<uint32_t> referring_to(uint32_t node) const { return graph_.referring_to(node); }

  std::optional<uint32_t> node_of(const at::Tensor& tensor) const {
    const auto node = graph_.find(tensor.storage().unsafeGetStorageImpl());
    return node == Graph::kNone ? std::nullopt : std::optional(node);
  }

  py::list leases(uint32_t node) const {
    py::list out;
    auto* storage = const_cast<void*>(graph_.object(node));
    for (const auto& row : tenure::ledger().leases().rows_of(storage)) {
      out.append(tenure::owner_text(row.owner) + ", scope " +
                 tenure::ledger().scopes().path(row.scope));
    }
    return out;
  }

 private:
  const c10::StorageImpl* storage_at(uint32_t node) const {
    return static_cast<const c10::StorageImpl*>(graph_.object(node));
  }

  // The bytes of each storage that would be freed if all that refers to it here went.
  std::vector<uint64_t> weights() const {
    std::vector<uint64_t> out(graph_.size(), 0);
    for (const auto node : storages_) {
      const auto [found, actual] = counts(node);
      out[node] = found >= actual ? bytes_of(*storage_at(node)) : 0;
    }
    return out;
  }

  // Note [What the collector would free]
  // Python's collector frees objects to which all references come from objects that it frees too,
  // as far as their tp_traverse tells it: what C++ refers to stays, and so does everything that
  // this keeps. Autograd's nodes and hooks tell it of some references and not of others, so whether
  // a cycle can be freed is not seen from its elements. The same count is made here, of the objects
  // that no root reaches. At once, for some of them may be gone when it is asked for.
  void find_garbage() {
    struct Count {
      std::vector<PyObject*> objects;
      std::unordered_map<PyObject*, Py_ssize_t> unexplained;
      std::vector<PyObject*> open;  // those that stay, and what they keep is still to be seen
    } count;
    for (auto node = uint32_t{0}; node < graph_.size(); ++node) {
      auto* object = static_cast<PyObject*>(const_cast<void*>(graph_.object(node)));
      if (!graph_.reached(node) && graph_.kind(node) == NodeKind::object &&
          PyObject_IS_GC(object) != 0 && PyObject_GC_IsTracked(object) != 0) {
        count.objects.push_back(object);
        count.unexplained.emplace(object, Py_REFCNT(object));
      }
    }
    for (auto* object : count.objects) {
      const auto explain = [](PyObject* target, void* given) {
        auto& all = static_cast<Count*>(given)->unexplained;
        if (const auto found = all.find(target); found != all.end()) {
          --found->second;
        }
        return 0;
      };
      Py_TYPE(object)->tp_traverse(object, explain, &count);
    }
    for (auto* object : count.objects) {
      if (count.unexplained[object] > 0) {
        count.open.push_back(object);
      }
    }
    for (auto* object : count.open) {
      count.unexplained.erase(object);
    }
    while (!count.open.empty()) {
      auto* object = count.open.back();
      count.open.pop_back();
      const auto stay = [](PyObject* target, void* given) {
        auto& self = *static_cast<Count*>(given);
        if (self.unexplained.erase(target) > 0) {
          self.open.push_back(target);
        }
        return 0;
      };
      Py_TYPE(object)->tp_traverse(object, stay, &count);
    }
    for (auto* object : count.objects) {
      if (count.unexplained.contains(object)) {
        garbage_.insert(object);
      }
    }
  }

  // A cycle is broken where any one of its objects is freed.
  bool collectable(const std::vector<uint32_t>& cycle) const {
    return std::ranges::any_of(cycle, [&](uint32_t node) {
      return graph_.kind(node) == NodeKind::object && garbage_.contains(graph_.object(node));
    });
  }

  static PyTypeObject* numpy_array_type() {
    const auto modules = py::reinterpret_borrow<py::dict>(PyImport_GetModuleDict());
    if (!modules.contains("numpy") || !py::hasattr(modules["numpy"], "ndarray")) {
      return nullptr;
    }
    return reinterpret_cast<PyTypeObject*>(modules["numpy"].attr("ndarray").ptr());
  }

  void add_roots() {
    auto* interpreter = PyInterpreterState_Get();
    for (auto* thread = PyInterpreterState_ThreadHead(interpreter); thread != nullptr;
         thread = PyThreadState_Next(thread)) {
      each_local(thread, [&](PyCodeObject* code, int instruction, PyObject** values, int count) {
        if (skipped_.contains(code->co_filename)) {
          return;
        }
        frames_.push_back({code, instruction, std::vector<PyObject*>(values, values + count)});
      });
      if (thread->dict != nullptr) {
        roots_.emplace_back(thread->dict, "thread-local values");
      }
      if (thread->context != nullptr) {
        roots_.emplace_back(thread->context, "context variables");
      }
      if (thread->exc_info != nullptr && thread->exc_info->exc_value != nullptr) {
        roots_.emplace_back(thread->exc_info->exc_value, "exception being handled");
      }
    }
    for (auto& frame : frames_) {
      graph_.add(NodeKind::frame, &frame);
    }
    roots_.emplace_back(PyImport_GetModuleDict(), "modules");
    for (const auto& [object, name] : roots_) {
      graph_.add(NodeKind::root, object);
    }
  }

  // All that Python's collector knows and no root reached: held by cycles or from C++.
  void add_loose() {
    const auto all = py::module_::import("gc").attr("get_objects")().cast<py::list>();
    for (const auto& object : all) {
      if (object.ptr() != all.ptr() && !skipped_.contains(object.ptr())) {
        graph_.add(NodeKind::object, object.ptr());
      }
    }
  }

  void expand() {
    for (auto node = graph_.expand_next(); node != Graph::kNone; node = graph_.expand_next()) {
      auto* object = const_cast<void*>(graph_.object(node));
      switch (graph_.kind(node)) {
        case NodeKind::frame:
          for (auto* value : static_cast<Frame*>(object)->values) {
            refer(value);
          }
          break;
        case NodeKind::root:
        case NodeKind::object:
          expand_object(static_cast<PyObject*>(object));
          break;
        case NodeKind::tensor:
          expand_tensor(*static_cast<c10::TensorImpl*>(object));
          break;
        case NodeKind::autograd:
          expand_autograd(*static_cast<Node*>(object));
          break;
        case NodeKind::storage:
          storages_.push_back(node);
          break;
      }
    }
  }

  void refer(PyObject* object) {
    if (object == nullptr || skipped_.contains(object)) {
      return;
    }
    auto* type = Py_TYPE(object);
    if (PyObject_IS_GC(object) != 0 ||
        (ndarray_ != nullptr && PyType_IsSubtype(type, ndarray_) != 0) || type == THPStorageClass ||
        PyObject_TypeCheck(object, THPStorageClass) ||
        type == tenure::python::saved_tensor_type()) {
      graph_.refer(NodeKind::object, object);
    }
  }
  void refer(const c10::TensorImpl* tensor) {
    if (tensor != nullptr && tensor != c10::UndefinedTensorImpl::singleton()) {
      graph_.refer(NodeKind::tensor, tensor);
    }
  }
  void refer(const torch::autograd::SavedVariable& saved) {
    if (const auto tensor = saved.get_raw_data(); tensor && tensor->defined()) {
      refer(*tensor);
    } else if (const auto hook = saved.retrieve_unpack_hook_data()) {
      refer(hook->first.ptr(getPyInterpreter()));
      refer(hook->second.ptr(getPyInterpreter()));
    }
  }
  void refer(const at::Tensor& tensor) { refer(tensor.unsafeGetTensorImpl()); }

  static int visit(PyObject* object, void* self) {
    static_cast<References*>(self)->refer(object);
    return 0;
  }

  void expand_object(PyObject* object) {
    auto* type = Py_TYPE(object);
    // Not PyObject_IsInstance, which asks the object and so runs its code.
    if (PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
      refer(THPVariable_Unpack(object).unsafeGetTensorImpl());
      if (auto** dict = _PyObject_GetDictPtr(object); dict != nullptr) {
        refer(*dict);
      }
      return;
    }
    if (THPStorageClass != nullptr && PyObject_TypeCheck(object, THPStorageClass)) {
      const auto& storage = THPStorage_Unpack(object);
      if (storage) {
        graph_.refer(NodeKind::storage, storage.unsafeGetStorageImpl());
      }
      return;
    }
    if (ndarray_ != nullptr && PyType_IsSubtype(type, ndarray_) != 0) {
      expand_objects_of_array(object);
      const auto base = py::reinterpret_steal<py::object>(PyObject_GetAttrString(object, "base"));
      if (base) {
        refer(base.ptr());
      } else {
        PyErr_Clear();
      }
      return;
    }
    if (type == tenure::python::saved_tensor_type()) {
      refer(tenure::python::saved_in(object));
      return;
    }
    if (PyObject_TypeCheck(object, &THPFunctionType)) {
      expand_function(*reinterpret_cast<THPFunction*>(object));
    }
    if (torch::autograd::THPCppFunction_Check(object)) {
      graph_.refer(NodeKind::autograd,
                   reinterpret_cast<torch::autograd::THPCppFunction*>(object)->cdata.get());
      return;
    }
    if (PyObject_IS_GC(object) != 0 && type->tp_traverse != nullptr) {
      type->tp_traverse(object, &References::visit, this);
    }
  }

  // An array of objects is a container that the collector does not know of.
  void expand_objects_of_array(PyObject* array) {
    if (Py_TYPE(array) != ndarray_) {
      return;  // a subclass's methods are the user's
    }
    const py::handle given(array);
    if (given.attr("dtype").attr("hasobject").cast<bool>()) {
      for (const auto& object : given.attr("ravel")().attr("tolist")().cast<py::list>()) {
        refer(object.ptr());
      }
    }
  }

  // What a Python autograd function keeps besides the attributes of its ctx.
  void expand_function(THPFunction& function) {
    for (const auto& saved : function.saved_variables) {
      refer(saved);
    }
    if (const auto* node = owned_node(function); node != nullptr) {
      graph_.refer(NodeKind::autograd, node);
    }
  }

  void expand_tensor(c10::TensorImpl& tensor) {
    if (tensor.has_storage() && tensor.unsafe_storage()) {
      graph_.refer(NodeKind::storage, tensor.unsafe_storage().unsafeGetStorageImpl());
    }
    refer(wrapper_of(tensor));
    if (const auto* sparse = dynamic_cast<const at::SparseTensorImpl*>(&tensor)) {
      refer(sparse->indices());
      refer(sparse->values());
    } else if (const auto* rows = dynamic_cast<const at::SparseCsrTensorImpl*>(&tensor)) {
      refer(rows->compressed_indices());
      refer(rows->plain_indices());
      refer(rows->values());
    }
    const auto held = at::Tensor(
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(&tensor));
    const auto* meta = torch::autograd::impl::get_autograd_meta(held);
    if (meta == nullptr) {
      return;
    }
    refer(meta->grad_);
    if (meta->grad_fn_) {
      graph_.refer(NodeKind::autograd, meta->grad_fn_.get());
    }
    for (const auto& hook : meta->hooks_) {
      refer(hook_dict(*hook));
    }
    if (meta->post_acc_grad_hooks_ != nullptr) {
      if (const auto* hooks = as<torch::autograd::PyFunctionTensorPostAccGradHooks>(
              *meta->post_acc_grad_hooks_, kPostAccumulateHooks)) {
        refer(hooks->dict);
      }
    }
    if (const auto* view = torch::autograd::impl::get_view_autograd_meta(held)) {
      if (view->has_bw_view()) {
        refer(view->get_backward_view().base_);
      }
    }
  }

  void expand_autograd(Node& node) {
    for (const auto& edge : node.next_edges()) {
      if (edge.function) {
        graph_.refer(NodeKind::autograd, edge.function.get());
      }
    }
    for (const auto& hook : node.pre_hooks()) {
      refer(hook_dict(*hook));
    }
    for (const auto& hook : node.tensor_pre_hooks()) {
      refer(hook_dict(*hook));
    }
    for (const auto& hook : node.post_hooks()) {
      if (const auto* mine = as<torch::autograd::PyFunctionPostHook>(*hook, kPostHook)) {
        refer(mine->dict);
      }
    }
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&node)) {
      refer(leaf->variable);
    } else if (const auto* function = as<torch::autograd::PyNode>(node, kPyNode)) {
      refer(function_of(*function));
    } else {
      expand_saved(node);
    }
  }

  void expand_saved(Node& node) {
    const bool told =
        tenure::python::each_saved(node, [&](const char*, const auto& saved) { refer(saved); });
    if (!told) {
      expand_for_compiler(node);
    }
  }

  // Nodes of extensions tell what they saved to autograd's compiler only, if at all. It unpacks, so
  // what it was given may be gone when it is done; and it throws at what was freed or changed.
  void expand_for_compiler(Node& node) {
    using namespace torch::dynamo::autograd;
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> tensors;
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    {
      AutogradCompilerCall call(SizeInput::DYNAMIC);
      NodeCall node_call(0, node.getptr());
      CompiledNodeArgs args(call, node_call);
      try {
        node.compiled_args(args);
      } catch (...) {  // NOLINT(bugprone-empty-catch): what was listed until then is used
      }
      for (const auto& tensor : call.tensor_args.inputs) {
        if (tensor.defined() && tensor.has_storage()) {
          tensors.emplace_back(tensor.getIntrusivePtr());
          storages.push_back(tensor.storage().getWeakStorageImpl());
        }
      }
      for (const auto& packed : call.packed_inputs) {
        refer(packed.ptr(getPyInterpreter()));
      }
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].use_count() > 0) {
        refer(tensors[i].lock().get());
      } else if (const auto storage = storages[i].lock()) {
        graph_.refer(NodeKind::storage, storage.get());
      }
    }
  }

  static PyObject* hook_dict(const torch::autograd::FunctionPreHook& hook) {
    if (const auto* tensor = as<torch::autograd::PyFunctionTensorPreHook>(hook, kTensorPreHook)) {
      return tensor->dict;
    }
    const auto* node = as<torch::autograd::PyFunctionPreHook>(hook, kPreHook);
    return node == nullptr ? nullptr : node->dict;
  }

  // The same thing is named differently by torch 2.11 and 2.13.
  template <class Function>
  static const Node* owned_node(const Function& function) {
    if constexpr (requires {
                    function.cdata.lock();
                    function.cdata.expired();
                  }) {
      return nullptr;  // the node owns the function
    } else {
      return function.cdata.get();
    }
  }
  template <class PyNode>
  static PyObject* function_of(const PyNode& node) {
    if constexpr (requires { node.pyobj(); }) {
      return node.pyobj();
    } else {
      return node.obj;
    }
  }
  template <class Tensor>
  static PyObject* wrapper_of(Tensor& tensor) {
    if constexpr (requires { tensor.pyobj_slot()->load_pyobj(); }) {
      return tensor.pyobj_slot()->load_pyobj();
    } else {
      return tensor.pyobj_slot()->check_pyobj().value_or(nullptr);
    }
  }
  // Elements as (kind, object or None, text, name of the next element in this one or "").
  py::list describe(const std::vector<uint32_t>& path) const {
    py::list out;
    for (size_t i = 0; i < path.size(); ++i) {
      const auto* next = i + 1 < path.size() ? graph_.object(path[i + 1]) : nullptr;
      out.append(describe(path[i], next));
    }
    return out;
  }

  py::tuple describe(uint32_t node, const void* next) const {
    auto* object = const_cast<void*>(graph_.object(node));
    const auto kind = graph_.kind(node);
    py::object shown = py::none();
    std::string text;
    std::string edge;
    if (kind == NodeKind::object) {
      shown = py::reinterpret_borrow<py::object>(static_cast<PyObject*>(object));
    } else if (kind == NodeKind::root) {
      shown = py::reinterpret_borrow<py::object>(static_cast<PyObject*>(object));
      for (const auto& [root, name] : roots_) {
        text = root == object ? name : text;
      }
    } else if (kind == NodeKind::frame) {
      const auto& frame = *static_cast<const Frame*>(object);
      const auto line = PyCode_Addr2Line(frame.code, frame.instruction * 2);
      text = py::str(frame.code->co_qualname).cast<std::string>();
      shown = py::make_tuple(py::reinterpret_borrow<py::object>(frame.code->co_filename), line);
      edge = local_name(frame, next);
    } else if (kind == NodeKind::autograd) {
      auto& function = *static_cast<Node*>(object);
      text = function.name();
      edge = saved_name(function, next);
      shown =
          py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(function.getptr()));
    } else if (kind == NodeKind::storage) {
      text = std::to_string(bytes_of(*static_cast<const c10::StorageImpl*>(object)));
    }
    return py::make_tuple(kind_name(kind), shown, text, edge);
  }

  // The name under which a node saved what a path goes on with.
  static std::string saved_name(Node& node, const void* next) {
    if (as<torch::autograd::PyNode>(node, kPyNode) != nullptr) {
      return "";
    }
    std::string found;
    tenure::python::each_saved(node, [&](const char* name, const auto& saved) {
      if (const auto tensor = saved.get_raw_data();
          tensor && tensor->defined() && tensor->unsafeGetTensorImpl() == next) {
        found += (found.empty() ? "" : "/") + std::string(name);
      }
    });
    return found;
  }

  static std::string local_name(const auto& frame, const void* value) {
    for (size_t i = 0; i < frame.values.size(); ++i) {
      if (frame.values[i] == value && static_cast<int>(i) < frame.code->co_nlocalsplus) {
        auto* name = PyTuple_GET_ITEM(frame.code->co_localsplusnames, static_cast<Py_ssize_t>(i));
        return py::str(name).cast<std::string>();
      }
    }
    return "";
  }

  struct Frame {
    PyCodeObject* code;
    int instruction;
    std::vector<PyObject*> values;
  };

  Graph graph_;
  std::unordered_set<const void*> skipped_;
  PyTypeObject* ndarray_;
  std::deque<Frame> frames_;
  std::vector<std::pair<PyObject*, const char*>> roots_;
  std::vector<uint32_t> storages_;
  mutable std::vector<uint64_t> gone_;       // by node, once asked for
  std::unordered_set<const void*> garbage_;  // what Python's collector would free
};

}  // namespace

void bind_references(py::module_& m) {
  // Much cheaper than the graph, for programs that have just begun.
  m.def("any_tensor", [] {
    const auto all = py::module_::import("gc").attr("get_objects")().cast<py::list>();
    return std::ranges::any_of(all, [](const py::handle& object) {
      return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(THPVariableClass));
    });
  });
  // Without making a Python object of the storage, which would stay.
  m.def(
      "storage_bytes",
      [](const at::Tensor& tensor) -> std::optional<size_t> {
        if (!tensor.defined() || !tensor.has_storage()) {
          return std::nullopt;
        }
        return bytes_of(*tensor.storage().unsafeGetStorageImpl());
      },
      py::arg("tensor"));
  py::class_<References>(m, "References")
      .def(py::init<const py::list&>(), py::arg("skip"))
      .def_property_readonly("size", &References::size)
      .def_property_readonly("references", &References::references)
      .def("storages", &References::storages)
      .def("adopt", &References::adopt)
      .def("counts", &References::counts, py::arg("node"))
      .def("retention", &References::retention, py::arg("node"))
      .def("labels_behind", &References::labels_behind, py::arg("node"), py::arg("nodes"),
           py::arg("labels"))
      .def("gone_with", &References::gone_with, py::arg("node"))
      .def("goes_with_reference", &References::goes_with_reference, py::arg("node"))
      .def("cycles", &References::cycles, py::arg("most"))
      .def("by_beginning", &References::by_beginning)
      .def("referring_to", &References::referring_to, py::arg("node"))
      .def("node_of", &References::node_of, py::arg("tensor"))
      .def("leases", &References::leases, py::arg("node"));
}
