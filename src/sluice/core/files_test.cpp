// SPDX-License-Identifier: Apache-2.0
// Files are whole or not there, whatever happens to the writer.
#include "sluice/core/files.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <sched.h>
#include <csignal>
#include <cstdio>
#include <fstream>

#include "sluice/core/error.h"
#include "sluice/core/testing.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Files, HoldWhatWasWritten) {
  const TemporaryFolder folder;
  const std::string bytes("a\0b\n", 4);
  write_file(folder / "a", bytes);
  EXPECT_EQ(read_file(folder / "a"), bytes);
  write_file(folder / "a", "");
  EXPECT_EQ(read_file(folder / "a"), "");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"a"});
}

TEST(Files, AreReadUpToALimit) {
  const TemporaryFolder folder;
  write_file(folder / "a", "12345");
  EXPECT_EQ(read_file(folder / "a", 5), "12345");
  EXPECT_THAT(error_of([&] { read_file(folder / "a", 4); }, ExitCode::kData),
              HasSubstr("a: 5 bytes, more than the 4 that a file of this kind may have"));
}

TEST(Files, NameThePathAndTheCauseOfAnError) {
  const TemporaryFolder folder;
  EXPECT_EQ(error_of([&] { read_file(folder / "none"); }, ExitCode::kData),
            fmt::format("{}: cannot open: No such file or directory", (folder / "none").string()));
  EXPECT_THAT(error_of([&] { read_file(folder.path()); }, ExitCode::kData), HasSubstr("not a regular file"));
  EXPECT_THAT(error_of([&] { write_file(folder / "no/where", "x"); }, ExitCode::kData), HasSubstr("cannot create"));
}

TEST(Files, StayAsTheyWereUntilTheNewOneIsWhole) {
  const TemporaryFolder folder;
  write_file(folder / "a", "old");
  {
    AtomicFile file(folder / "a");
    file.write("half");
    EXPECT_EQ(read_file(folder / "a"), "old");
  }
  EXPECT_EQ(read_file(folder / "a"), "old");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"a"});  // nothing is left behind
  AtomicFile file(folder / "a");
  file.write("ne");
  file.write("w");
  file.commit();
  EXPECT_EQ(read_file(folder / "a"), "new");
}

TEST(Files, SurviveAKilledWriter) {
  const TemporaryFolder folder;
  write_file(folder / "a", "old");
  const int status = run_in_child([&] {
    AtomicFile file(folder / "a");
    file.write("half");
    ::raise(SIGKILL);
    return 0;
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(read_file(folder / "a"), "old");
  // What it left is named so that nobody takes it for the file.
  const auto names = names_in(folder.path());
  ASSERT_EQ(names.size(), 2);
  EXPECT_TRUE(names[0].starts_with(kPartialPrefix));
  write_file(folder / "a", "new");
  EXPECT_EQ(read_file(folder / "a"), "new");
}

// A file that may not grow past a limit stands for a disk that takes no more: write() fails in the middle.
TEST(Files, SurviveAWriteThatFails) {
  const TemporaryFolder folder;
  write_file(folder / "a", "old");
  const int status = run_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 4096, .rlim_max = 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const auto error = error_of([&] { write_file(folder / "a", std::string(100'000, 'x')); }, ExitCode::kRuntime);
    return error.ends_with("a: cannot write: File too large") ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_file(folder / "a"), "old");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"a"});
}

constexpr int kNotAllowed = 77;

// Runs in a name space of its own, where it is root and may mount a disk of 64 KiB.
int fill_a_small_disk(const fs::path& disk) {
  const auto [user, group] = std::pair(::getuid(), ::getgid());
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return kNotAllowed;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << fmt::format("0 {} 1", user);
  std::ofstream("/proc/self/gid_map") << fmt::format("0 {} 1", group);
  if (::mount("none", disk.c_str(), "tmpfs", 0, "size=64k") != 0) return kNotAllowed;
  write_file(disk / "a", "old");
  const auto error = error_of([&] { write_file(disk / "a", std::string(1 << 20, 'x')); }, ExitCode::kRuntime);
  const bool clear =
      error.ends_with("a: cannot write: No space left on device; free space there, nothing was half written");
  const bool whole = read_file(disk / "a") == "old" && names_in(disk).size() == 1;
  write_file(disk / "a", std::string(32 << 10, 'x'));  // the failed attempt gave its space back
  return clear && whole ? 0 : 1;
}

TEST(Files, SurviveAFullDisk) {
  const TemporaryFolder folder;
  const int status = run_in_child([&] { return fill_a_small_disk(folder.path()); });
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNotAllowed) GTEST_SKIP() << "this user may not mount a small disk";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Folders, AppearWhole) {
  const TemporaryFolder folder;
  {
    AtomicFolder partial(folder / "out/");
    write_file(partial.path() / "a", "1");
    EXPECT_FALSE(fs::exists(folder / "out"));
    partial.commit();
  }
  EXPECT_EQ(read_file(folder / "out/a"), "1");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"out"});
}

TEST(Folders, LeaveNothingWhenTheyAreNotFinished) {
  const TemporaryFolder folder;
  {
    AtomicFolder partial(folder / "out");
    write_file(partial.path() / "a", "1");
  }
  EXPECT_TRUE(names_in(folder.path()).empty());
}

TEST(Folders, RefuseToReplaceOneUnlessTold) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "out");
  write_file(folder / "out/old", "1");
  EXPECT_THAT(error_of([&] { AtomicFolder(folder / "out"); }, ExitCode::kUsage), HasSubstr("exists and is not empty"));
  AtomicFolder partial(folder / "out", AtomicFolder::Existing::kReplace);
  write_file(partial.path() / "new", "2");
  EXPECT_EQ(names_in(folder / "out"), std::vector<std::string>{"old"});
  partial.commit();
  EXPECT_EQ(names_in(folder / "out"), std::vector<std::string>{"new"});
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"out"});
}

TEST(NewFile, IsOneThatReplacesNothing) {
  const TemporaryFolder folder;
  check_new_file(folder / "none");
  EXPECT_THAT(error_of([&] { check_new_file(folder.path()); }, ExitCode::kUsage),
              HasSubstr("exists; name another file or remove it first"));
  const auto circle = folder / "circle";  // whether something is there cannot be said
  fs::create_symlink(circle, circle);
  for (const auto& check : {check_new_file, check_new_folder}) {
    EXPECT_EQ(error_of([&] { check(circle); }, ExitCode::kRuntime),
              fmt::format("{}: cannot examine: Too many levels of symbolic links", circle.string()));
  }
}

TEST(NewFolder, IsOneThatReplacesNothing) {
  const TemporaryFolder folder;
  check_new_folder(folder / "none");
  check_new_folder(folder.path());
  write_file(folder / "file", "");
  EXPECT_THAT(error_of([&] { check_new_folder(folder / "file"); }, ExitCode::kUsage),
              HasSubstr("file: exists and is no folder"));
  EXPECT_THAT(error_of([&] { check_new_folder(folder.path()); }, ExitCode::kUsage),
              HasSubstr("exists and is not empty; name another folder or remove it first"));
}

TEST(Mappings, ShowTheFileAndKeepTheirChangesToThemselves) {
  const TemporaryFolder folder;
  write_file(folder / "a", "abc");
  const MappedFile mapped(folder / "a", MappedFile::Access::kCopyOnWrite);
  mapped.writable_bytes()[0] = std::byte{'x'};
  EXPECT_EQ(mapped.bytes()[0], std::byte{'x'});
  EXPECT_EQ(read_file(folder / "a"), "abc");
  write_file(folder / "empty", "");
  EXPECT_TRUE(MappedFile(folder / "empty").bytes().empty());
}

TEST(Checksum, ChangesWithOneBit) {
  const std::string a = "abc", b = "abb";
  EXPECT_EQ(checksum(std::as_bytes(std::span(a))).size(), 16);
  EXPECT_EQ(checksum(std::as_bytes(std::span(a))), checksum(std::as_bytes(std::span(a))));
  EXPECT_NE(checksum(std::as_bytes(std::span(a))), checksum(std::as_bytes(std::span(b))));
}

}  // namespace
}  // namespace sluice
