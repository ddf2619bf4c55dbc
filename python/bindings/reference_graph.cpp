#include "reference_graph.h"

#include "collector.h"
#include "frames.h"
#include "holders.h"
#include "saved_tensors.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
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
#include <typeinfo>

namespace py = pybind11;

namespace tenure::python {

using inspect::Graph;
using inspect::NodeKind;
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

at::Tensor strong(c10::TensorImpl& tensor) {
  return at::Tensor(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(&tensor));
}

std::string local_name(const RunningFrame& frame, const void* value) {
  for (size_t i = 0; frame.named && value != nullptr && i < frame.values.size(); ++i) {
    if (frame.values[i] == value) {
      auto* name = PyTuple_GET_ITEM(frame.code->co_localsplusnames, static_cast<Py_ssize_t>(i));
      return py::str(name).cast<std::string>();
    }
  }
  return "";
}

}  // namespace

size_t bytes_of(const c10::StorageImpl& storage) {
  // NOLINTNEXTLINE(*-const-cast): the other ways to ask raise for one whose data was released
  if (const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks().get() == nullptr) {
    return 0;
  }
  const auto bytes = storage.sym_nbytes().maybe_as_int();
  return bytes ? static_cast<size_t>(*bytes) : 0;
}

// Adds what there is, breadth first.
class ReferenceGraph::Walk {
 public:
  Walk(ReferenceGraph& out, const py::list& skip, const py::list& late)
      : out_(out), ndarray_(numpy_array_type()) {
    for (const auto& file : late) {
      late_.insert(file.ptr());
    }
    skipped_.insert(skip.ptr());
    for (const auto& object : skip) {
      skipped_.insert(object.ptr());
    }
    auto* modules = PyImport_GetModuleDict();
    for (const auto& [name, module] : py::reinterpret_borrow<py::dict>(modules)) {
      if (PyModule_Check(module.ptr())) {
        of_modules_.insert({module.ptr(), PyModule_GetDict(module.ptr())});
      }
    }
  }

  void run() {
    add_roots();
    expand();
    for (auto& frame : late_frames_) {
      out_.graph_.add(NodeKind::frame, &out_.frames_.emplace_back(std::move(frame)));
    }
    expand();
    // A way through a variable says more than a shorter one through what a frame is in the middle
    // of.
    for (auto& frame : stacks_) {
      out_.graph_.add(NodeKind::frame, &out_.frames_.emplace_back(std::move(frame)));
    }
    expand();
    out_.graph_.begin_loose();
    add_loose();
    expand();
  }

 private:
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
        const auto variables = std::min(count, code->co_nlocalsplus);
        RunningFrame frame{code, instruction, true, {values, values + variables}};
        if (late_.contains(code->co_filename)) {
          late_frames_.push_back(std::move(frame));
        } else {
          out_.frames_.push_back(std::move(frame));
        }
        stacks_.push_back({code, instruction, false, {values + variables, values + count}});
      });
      if (thread->dict != nullptr) {
        out_.roots_.emplace_back(thread->dict, "thread-local values");
      }
      if (thread->context != nullptr) {
        out_.roots_.emplace_back(thread->context, "context variables");
      }
      if (thread->exc_info != nullptr && thread->exc_info->exc_value != nullptr) {
        out_.roots_.emplace_back(thread->exc_info->exc_value, "exception being handled");
      }
    }
    for (auto& frame : out_.frames_) {
      out_.graph_.add(NodeKind::frame, &frame);
    }
    out_.roots_.emplace_back(PyImport_GetModuleDict(), "modules");
    for (const auto& [object, name] : out_.roots_) {
      out_.graph_.add(NodeKind::root, object);
    }
  }

  // All that Python's collector knows and no root reached: held by cycles or from C++.
  void add_loose() {
    const auto all = py::module_::import("gc").attr("get_objects")().cast<py::list>();
    for (const auto& object : all) {
      if (object.ptr() != all.ptr() && !skipped_.contains(object.ptr())) {
        out_.graph_.add(NodeKind::object, object.ptr());
      }
    }
  }

  void expand() {
    for (auto node = out_.graph_.expand_next(); node != Graph::kNone;
         node = out_.graph_.expand_next()) {
      auto* object = const_cast<void*>(out_.graph_.object(node));
      switch (out_.graph_.kind(node)) {
        case NodeKind::frame:
          for (auto* value : static_cast<RunningFrame*>(object)->values) {
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
          expand_autograd(node, *static_cast<Node*>(object));
          break;
        case NodeKind::storage:
          out_.storages_.push_back(node);
          break;
      }
    }
  }

  void refer(PyObject* object) {
    // Some modules of Python's own show their free lists, whose objects are dead.
    if (object == nullptr || Py_REFCNT(object) == 0 || skipped_.contains(object)) {
      return;
    }
    auto* type = Py_TYPE(object);
    // A module's variables are the module's, though each of its functions refers to them.
    if (!in_modules_ && (type == &PyDict_Type || PyModule_Check(object)) &&
        of_modules_.contains(object)) {
      return;
    }
    if (PyObject_IS_GC(object) != 0 ||
        (ndarray_ != nullptr && PyType_IsSubtype(type, ndarray_) != 0) || type == THPStorageClass ||
        PyObject_TypeCheck(object, THPStorageClass) || type == saved_tensor_type() ||
        holder(type) != nullptr) {
      out_.graph_.refer(NodeKind::object, object);
    }
  }
  void refer(const c10::TensorImpl* tensor) {
    if (tensor != nullptr && tensor != c10::UndefinedTensorImpl::singleton()) {
      out_.graph_.refer(NodeKind::tensor, tensor);
    }
  }
  // Returns what was saved: a tensor, or what a hook has made of it.
  const void* refer(const torch::autograd::SavedVariable& saved) {
    if (const auto tensor = saved.get_raw_data(); tensor && tensor->defined()) {
      refer(*tensor);
      return tensor->unsafeGetTensorImpl();
    }
    if (const auto hook = saved.retrieve_unpack_hook_data()) {
      refer(hook->first.ptr(getPyInterpreter()));
      refer(hook->second.ptr(getPyInterpreter()));
      return hook->second.ptr(getPyInterpreter());
    }
    return nullptr;
  }
  void refer(const at::Tensor& tensor) { refer(tensor.unsafeGetTensorImpl()); }

  static int visit(PyObject* object, void* self) {
    static_cast<Walk*>(self)->refer(object);
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
        out_.graph_.refer(NodeKind::storage, storage.unsafeGetStorageImpl());
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
    if (type == saved_tensor_type()) {
      refer(saved_in(object));
      return;
    }
    if (const auto held_by = holder(type)) {
      for (const auto& storage : held_by(object)) {
        out_.graph_.refer(NodeKind::storage, storage.unsafeGetStorageImpl());
      }
      return;
    }
    if (PyObject_TypeCheck(object, &THPFunctionType)) {
      expand_function(*reinterpret_cast<THPFunction*>(object));
    }
    if (torch::autograd::THPCppFunction_Check(object)) {
      out_.graph_.refer(NodeKind::autograd,
                        reinterpret_cast<torch::autograd::THPCppFunction*>(object)->cdata.get());
      return;
    }
    if (PyObject_IS_GC(object) != 0 && type->tp_traverse != nullptr) {
      in_modules_ = object == PyImport_GetModuleDict() || of_modules_.contains(object);
      type->tp_traverse(object, &Walk::visit, this);
      in_modules_ = false;
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
      out_.graph_.refer(NodeKind::autograd, node);
    }
  }

  void expand_tensor(c10::TensorImpl& tensor) {
    if (tensor.has_storage() && tensor.unsafe_storage()) {
      out_.graph_.refer(NodeKind::storage, tensor.unsafe_storage().unsafeGetStorageImpl());
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
    const auto held = strong(tensor);
    const auto* meta = torch::autograd::impl::get_autograd_meta(held);
    if (meta == nullptr) {
      return;
    }
    refer(meta->grad_);
    if (meta->grad_fn_) {
      out_.graph_.refer(NodeKind::autograd, meta->grad_fn_.get());
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
      if (view->has_fw_view() && !view->shared_view_info()) {
        refer(view->get_forward_view().base_);
      }
    }
  }

  void expand_autograd(uint32_t number, Node& node) {
    for (const auto& edge : node.next_edges()) {
      if (edge.function) {
        out_.graph_.refer(NodeKind::autograd, edge.function.get());
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
      expand_saved(number, node);
    }
  }

  void expand_saved(uint32_t number, Node& node) {
    const bool told = each_saved(node, [&](const char* name, const auto& saved) {
      if (const auto* what = refer(saved)) {
        out_.saved_.push_back({number, what, name});
      }
    });
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
        out_.graph_.refer(NodeKind::storage, storage.get());
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
    if constexpr (requires { node.obj; }) {
      return node.obj;  // where its pyobj() is null
    } else {
      return node.pyobj();
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

  ReferenceGraph& out_;
  std::vector<RunningFrame> late_frames_, stacks_;
  std::unordered_set<const void*> skipped_, late_;
  std::unordered_set<const void*> of_modules_;  // modules that are loaded, and their dicts
  bool in_modules_ = false;                     // what is being expanded is one, or all of them
  PyTypeObject* ndarray_;
};

ReferenceGraph::ReferenceGraph(const py::list& skip, const py::list& late) {
  const NoCollections still;
  Walk(*this, skip, late).run();
  garbage_ = garbage_in(graph_);
  keep();
}

ReferenceGraph::~ReferenceGraph() {
  for (auto* object : kept_objects_) {
    Py_DECREF(object);
  }
}

void ReferenceGraph::keep() {
  for (auto node = uint32_t{0}; node < graph_.size(); ++node) {
    auto* object = const_cast<void*>(graph_.object(node));
    switch (graph_.kind(node)) {
      case NodeKind::root:
      case NodeKind::object:
        kept_objects_.push_back(Py_NewRef(static_cast<PyObject*>(object)));
        break;
      case NodeKind::frame:
        kept_objects_.push_back(
            Py_NewRef(reinterpret_cast<PyObject*>(static_cast<RunningFrame*>(object)->code)));
        break;
      case NodeKind::tensor:
        kept_tensors_.emplace_back(strong(*static_cast<c10::TensorImpl*>(object)));
        break;
      case NodeKind::autograd:
        kept_nodes_.push_back(static_cast<Node*>(object)->getptr());
        break;
      case NodeKind::storage:
        kept_storages_.emplace_back(
            c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage(node)));
        break;
    }
  }
}

size_t ReferenceGraph::use_count(uint32_t node) const {
  auto* object = const_cast<void*>(graph_.object(node));
  const auto count = graph_.kind(node) == NodeKind::tensor
                         ? c10::raw::intrusive_ptr::use_count(static_cast<c10::TensorImpl*>(object))
                         : c10::raw::intrusive_ptr::use_count(&storage(node));
  return count - 1;
}

bool ReferenceGraph::collectable(const std::vector<uint32_t>& cycle) const {
  return std::ranges::any_of(cycle, [&](uint32_t node) {
    return graph_.kind(node) == NodeKind::object && garbage_.contains(graph_.object(node));
  });
}

std::string ReferenceGraph::saved_name(uint32_t node, const void* what) const {
  std::string out;
  for (const auto& saved : std::ranges::equal_range(saved_, node, {}, &Saved::node)) {
    if (saved.what == what) {
      out += (out.empty() ? "" : "/") + std::string(saved.name);
    }
  }
  return out;
}

py::list ReferenceGraph::describe(const std::vector<uint32_t>& path) const {
  py::list out;
  for (size_t i = 0; i < path.size(); ++i) {
    const auto* next = i + 1 < path.size() ? graph_.object(path[i + 1]) : nullptr;
    out.append(describe(path[i], next));
  }
  return out;
}

py::tuple ReferenceGraph::describe(uint32_t node, const void* next) const {
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
    const auto& frame = *static_cast<const RunningFrame*>(object);
    const auto line = PyCode_Addr2Line(frame.code, frame.instruction * 2);
    text = py::str(frame.code->co_qualname).cast<std::string>();
    shown = py::make_tuple(py::reinterpret_borrow<py::object>(frame.code->co_filename), line);
    edge = local_name(frame, next);
  } else if (kind == NodeKind::autograd) {
    auto& function = *static_cast<Node*>(object);
    text = function.name();
    edge = saved_name(node, next);
    shown =
        py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(function.getptr()));
  } else if (kind == NodeKind::storage) {
    text = std::to_string(bytes_of(storage(node)));
  }
  return py::make_tuple(kind_name(kind), shown, text, edge);
}

}  // namespace tenure::python
