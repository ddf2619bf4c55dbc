#include <tenure/store/secret.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace tenure::store {
namespace {

constexpr std::string_view kWords = "correct horse battery";

class SecretFile : public testing::Test {
 public:
  SecretFile() {
    std::string pattern = std::filesystem::temp_directory_path() / "tenure-secret-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  SecretFile(const SecretFile&) = delete;
  SecretFile& operator=(const SecretFile&) = delete;
  SecretFile(SecretFile&&) = delete;
  SecretFile& operator=(SecretFile&&) = delete;
  ~SecretFile() override { std::filesystem::remove_all(folder_); }

 protected:
  std::string file(std::string_view content, mode_t mode = 0600) {
    const std::string path = folder_ / "secret";
    std::ofstream(path, std::ios::binary) << content;
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }

  static std::string complaint(const std::string& path) {
    try {
      secret_from_file(path);
    } catch (const InputError& error) {
      return error.what();
    }
    return {};
  }

  std::filesystem::path folder_;
};

TEST(Secret, HasAtLeastSixteenBytes) {
  EXPECT_THROW(Secret("123456789012345"), InputError);
  EXPECT_EQ(Secret("1234567890123456").bytes(), "1234567890123456");
  EXPECT_TRUE(Secret().empty());
}

TEST(Secret, AComplaintDoesNotRepeatIt) {
  try {
    const Secret secret("hunter2");
    FAIL() << "taken";
  } catch (const InputError& error) {
    EXPECT_EQ(std::string(error.what()).find("hunter2"), std::string::npos);
  }
}

TEST(Secret, AssignmentAndMovesKeepTheBytes) {
  Secret a(kWords);
  Secret b;
  b = a;
  EXPECT_EQ(a.bytes(), kWords);
  EXPECT_EQ(b.bytes(), kWords);
  Secret c(std::move(b));
  EXPECT_EQ(c.bytes(), kWords);
  a = Secret("another one of sixteen");
  EXPECT_EQ(a.bytes(), "another one of sixteen");
}

TEST_F(SecretFile, IsReadWithoutItsLineEnd) {
  EXPECT_EQ(secret_from_file(file(std::string(kWords) + "\n")).bytes(), kWords);
  EXPECT_EQ(secret_from_file(file(std::string(kWords) + "\r\n")).bytes(), kWords);
  EXPECT_EQ(secret_from_file(file(kWords)).bytes(), kWords);
}

TEST_F(SecretFile, MayHoldAnyBytes) {
  std::string bytes(32, '\0');
  bytes[5] = '\n';
  EXPECT_EQ(secret_from_file(file(bytes)).bytes(), bytes);
}

TEST_F(SecretFile, ThatOthersCanUseIsRefused) {
  for (const mode_t mode : {0640, 0604, 0620, 0602, 0660, 0666}) {
    const auto path = file(kWords, mode);
    EXPECT_EQ(complaint(path), text("the store's secret cannot be taken from ", path,
                                    ": others than its owner can use it. Run: chmod 600 ", path));
  }
  EXPECT_EQ(complaint(file(kWords, 0400)), "");
}

TEST_F(SecretFile, ThatIsNoneIsRefused) {
  EXPECT_NE(complaint(folder_ / "absent"), "");
  EXPECT_NE(complaint(folder_), "");
  const std::string pipe = folder_ / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(complaint(pipe), "") << "and it does not wait for a writer";
}

TEST_F(SecretFile, OfAnotherUserIsRefused) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "only root can give a file away";
  }
  const auto path = file(kWords);
  ASSERT_EQ(chown(path.c_str(), 12345, 12345), 0);
  EXPECT_NE(complaint(path).find("belongs to user 12345"), std::string::npos);
}

TEST_F(SecretFile, HasLimits) {
  EXPECT_NE(complaint(file("short\n")), "");
  EXPECT_NE(complaint(file("")), "");
  EXPECT_EQ(complaint(file(std::string(4096, 's') + "\r\n")), "");
  EXPECT_NE(complaint(file(std::string(4097, 's'))), "");
  EXPECT_NE(complaint(file(std::string(1 << 20, 's'))), "");
}

}  // namespace
}  // namespace tenure::store
