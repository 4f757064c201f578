// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/scratch_file.h"

#include <gtest/gtest.h>

#include "sluice/core/testing.h"

namespace sluice {
namespace {

TEST(ScratchFile, HoldsWhatIsWrittenAndLeavesNoName) {
  const TemporaryFolder folder;
  const ScratchFile file(folder.path(), 100'000);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  const auto bytes = file.bytes();
  ASSERT_EQ(bytes.size(), 100'000U);
  EXPECT_EQ(bytes[99'999], std::byte{0});
  bytes[5'000] = std::byte{7};
  ScratchFile::release(bytes.subspan(4'999, 3));
  ScratchFile::expect(bytes.subspan(4'999, 3));
  EXPECT_EQ(bytes[5'000], std::byte{7});
}

TEST(ScratchFile, NeedsNoFileForNothing) {
  const ScratchFile file("/no such folder", 0);
  EXPECT_TRUE(file.bytes().empty());
}

TEST(ScratchFile, SaysWhereItHasNoRoom) {
  const TemporaryFolder folder;
  const auto message = error_of([&] { ScratchFile(folder.path(), std::size_t{1} << 60); }, ExitCode::kRuntime);
  EXPECT_NE(message.find(folder.path().string() + ": cannot make a file of 1073741824.000 GiB there"),
            std::string::npos)
      << message;
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace sluice
