#include <tenure/offload/interpose.h>

#include <tenure/core/error.h>

#include <ATen/core/op_registration/op_registration.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <thread>

namespace tenure::offload {
namespace {

// Writes down the names of the calls, and runs them.
class Names final : public Watcher {
 public:
  void call(const Operator& op, Invocation& invocation) override {
    names.emplace_back(name_of(op.name));
    pure.push_back(op.pure);
    writes.push_back(op.writes.size());
    invocation.run();
  }
  bool saw(std::string_view name) const { return std::ranges::find(names, name) != names.end(); }

  std::vector<std::string> names;
  std::vector<bool> pure;
  std::vector<size_t> writes;
};

class Watched {
 public:
  Watched() : names(std::make_shared<Names>()) { watch_calls(names); }
  ~Watched() { unwatch_calls(*names); }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

  std::shared_ptr<Names> names;
};

TEST(Interpose, SeesCallsThatMakeTensorsAndNoViews) {
  const Watched watched;
  const auto x = at::ones({4, 4});
  (void)x.view({16}).narrow(0, 0, 4).exp();
  EXPECT_EQ(watched.names->names, (std::vector<std::string>{"aten::ones", "aten::exp"}));
}

TEST(Interpose, KnowsWhatIsWrittenTo) {
  const auto x = at::ones({4});
  const Watched watched;
  x.add_(1);
  (void)at::add(x, 1);
  EXPECT_EQ(watched.names->writes, (std::vector<size_t>{1, 0}));
}

TEST(Interpose, RandomAndWritingOperatorsAreNotPure) {
  const auto x = at::ones({4});
  const Watched watched;
  (void)at::native_dropout(x, 0.5, true);
  x.mul_(2);
  (void)at::ones({2});
  (void)at::cat({x, x});
  EXPECT_EQ(watched.names->pure, (std::vector<bool>{false, false, false, true}));
}

TEST(Interpose, OtherThreadsAreNotWatched) {
  const Watched watched;
  std::thread([] { (void)at::ones({4}).exp(); }).join();
  EXPECT_TRUE(watched.names->names.empty());
}

TEST(Interpose, NothingIsSeenAfterwards) {
  std::shared_ptr<Names> names;
  {
    const Watched watched;
    names = watched.names;
  }
  (void)at::ones({4}).exp();
  EXPECT_TRUE(names->names.empty());
}

TEST(Interpose, OneThreadHasOneWatcher) {
  const Watched watched;
  EXPECT_THROW(watch_calls(std::make_shared<Names>()), InputError);
}

TEST(Interpose, AnOperatorThatThrowsLeavesTheWatcherThere) {
  const Watched watched;
  EXPECT_ANY_THROW(at::ones({3}).mm(at::ones({4})));
  (void)at::ones({4}).exp();
  EXPECT_TRUE(watched.names->saw("aten::exp"));
}

at::Tensor doubled(const at::Tensor& x) { return at::add(x, x); }

TEST(Interpose, OperatorsOfLibrariesThatComeLaterAreSeenByTheNextWatcher) {
  {
    const Watched watched;
  }
  torch::Library library(torch::Library::FRAGMENT, "tenure_interpose", std::nullopt, __FILE__,
                         __LINE__);
  library.def("doubled(Tensor x) -> Tensor");
  library.impl("doubled", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(doubled)));
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("tenure_interpose::doubled", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  const auto x = at::ones({4});
  const Watched watched;
  EXPECT_EQ(op.call(x).sum().item<float>(), 8);
  EXPECT_TRUE(watched.names->saw("tenure_interpose::doubled"));
  EXPECT_FALSE(watched.names->saw("aten::add")) << "what a kernel calls inside is not seen";
  EXPECT_FALSE(watched.names->pure.front()) << "nobody knows what else it does";
}

TEST(Interpose, ALibraryMayGoWhileItsOperatorsAreKnown) {
  {
    torch::Library library(torch::Library::FRAGMENT, "tenure_interpose", std::nullopt, __FILE__,
                           __LINE__);
    library.def("gone(Tensor x) -> Tensor");
    library.impl("gone", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(doubled)));
    const Watched watched;
  }
  const Watched watched;
  (void)at::ones({4}).exp();
  EXPECT_TRUE(watched.names->saw("aten::exp"));
}

}  // namespace
}  // namespace tenure::offload
