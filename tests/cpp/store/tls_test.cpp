// Connections with TLS, as seen from both of their sides.
#include <tenure/store/tls.h>

#include "served.h"
#include "stranger.h"
#include <tenure/store/errors.h>
#include <tenure/store/frame.h>
#include <tenure/store/transport.h>
#include <tenure/store/waiting.h>

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <string>

namespace tenure::store {
namespace {

// A certificate that is its own authority.
class OverTls : public testing::Test {
 protected:
  void SetUp() override {
    files_ = certificate("ours");
    if (files_.key.empty()) {
      GTEST_SKIP() << "certificates are made with the command `openssl`";
    }
  }

  [[nodiscard]] TlsFiles certificate(const std::string& name) const {
    const std::string path = folder_.path() + "/" + name;
    const std::string command =
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
        "/CN=" +
        name + " -keyout " + path + ".key -out " + path + ".pem 2>/dev/null";
    // NOLINTNEXTLINE(cert-env33-c,concurrency-mt-unsafe): a test's own words, in its own thread
    if (std::system(command.c_str()) != 0) {
      return {};
    }
    return {.certificate = path + ".pem", .key = path + ".key", .authority = path + ".pem"};
  }

  Served& serve(const std::function<void(ServerOptions&)>& change = {}) {
    owner_ = std::make_unique<Served>(kOwner, [&](ServerOptions& options) {
      options.tls = files_;
      if (change) {
        change(options);
      }
    });
    return *owner_;
  }
  [[nodiscard]] std::unique_ptr<Transport> connect(const TlsFiles& files) const {
    const Credentials who{.job = kJob, .secret = kSecret, .tls = tls_context(files)};
    return connect_tcp("127.0.0.1", owner_->server.origin()->port, who, within(kLong));
  }
  // A connection past its introduction.
  [[nodiscard]] std::unique_ptr<Transport> member() const {
    auto transport = connect(files_);
    const Introduce self{.job = kJob, .member = trainer(7), .purpose = Purpose::notices};
    send_all(*transport, frame(MessageKind::introduce, encode(self)), within(kLong));
    receive_body(*transport, MessageKind::welcome, within(kLong));
    return transport;
  }

  TestFolder folder_;
  TlsFiles files_;
  std::unique_ptr<Served> owner_;
};

TEST_F(OverTls, ItsEndIsOwnerLost) {
  serve();
  const auto transport = member();
  owner_.reset();
  std::array<std::byte, 1> byte{};
  EXPECT_THROW(receive_all(*transport, byte, within(kLong)), OwnerLost);
}

TEST_F(OverTls, AFullServerSaysSo) {
  serve([](ServerOptions& options) { options.most_connections = 2; });
  {
    const auto one = member();
    const auto two = member();
    EXPECT_TRUE(says(what_of<AccessRefused>([&] { static_cast<void>(connect(files_)); }),
                     {"as many connections"}));
    EXPECT_EQ(owner_->server.stats().refused_full, 1U);
  }
  EXPECT_TRUE(eventually([&] { return owner_->server.stats().connections == 0; }));
  EXPECT_NO_THROW(static_cast<void>(member()));
}

TEST_F(OverTls, OneWhoseTlsFailsIsCounted) {
  serve();
  const Stranger without(*owner_->server.origin(), Wire::tcp);
  without.say(encode(without.hello()));
  EXPECT_TRUE(without.is_ended());
  EXPECT_EQ(owner_->server.stats().dropped_protocol, 1U);
  EXPECT_THROW(static_cast<void>(connect(certificate("another"))), AccessRefused);
  EXPECT_TRUE(eventually([&] { return owner_->server.stats().dropped_protocol == 2; }));
}

TEST_F(OverTls, AServerWithoutItIsNamed) {
  serve([](ServerOptions& options) { options.tls = {}; });
  EXPECT_TRUE(says(what_of<OwnerLost>([&] { static_cast<void>(connect(files_)); }), {"TLS"}));
}

}  // namespace
}  // namespace tenure::store
