// SPDX-License-Identifier: Apache-2.0
#include "sluice/formats/safetensors.h"

#include "sluice/formats/json.h"
#include "sluice/formats/test_files.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string header_error(std::string_view header, std::size_t data_bytes) {
  const auto file = raw_safetensors(header, data_bytes);
  return data_error([&] { parse_safetensors_header(bytes_of(file), "a.safetensors"); });
}

TEST(Json, SaysWhereItIsBroken) {
  EXPECT_THAT(data_error([] { parse_json("{\n  \"a\": 1,\n  \"b\": }\n", "c.json"); }),
              HasSubstr("c.json:3:8: not valid JSON"));
}

TEST(Json, RefusesANameThatStandsTwiceInOneObject) {
  EXPECT_THAT(data_error([] { parse_json(R"({"a": {"x": 1}, "b": {"x": 1}, "a": 2})", "c.json"); }),
              HasSubstr("\"a\" stands twice"));
  EXPECT_EQ(parse_json(R"({"a": {"x": 1}, "b": {"x": 2}})", "c.json")["b"]["x"], 2);
}

TEST(Json, BoundsNesting) {
  EXPECT_NO_THROW(parse_json(std::string(kMaxJsonDepth, '[') + std::string(kMaxJsonDepth, ']'), "c.json"));
  EXPECT_THAT(data_error([] { parse_json(std::string(1'000'000, '['), "c.json"); }), HasSubstr("nests deeper than 64"));
}

TEST(Json, ReadsEveryKindOfValue) {
  const auto value = parse_json(R"({"a": [1, -2, 1.5, true, null, "x", {}, []], "b": {"c": [[3]]}})", "c.json");
  EXPECT_EQ(value.dump(), R"({"a":[1,-2,1.5,true,null,"x",{},[]],"b":{"c":[[3]]}})");
  EXPECT_EQ(parse_json("7", "c.json"), 7);
}

TEST(Json, RefusesNumbersOutOfRangeAndBrokenText) {
  EXPECT_THAT(data_error([] { parse_json("[1e999]", "c.json"); }), HasSubstr("too large"));
  EXPECT_THAT(data_error([] { parse_json("[\"\xff\"]", "c.json"); }), HasSubstr("not valid JSON"));
  EXPECT_THAT(data_error([] { parse_json("", "c.json"); }), HasSubstr("not valid JSON"));
}

TEST(Json, UntrustedTextIsEscapedAndCut) {
  EXPECT_EQ(printable("a\x1b[31m\n"), "a\\u001b[31m\\n");
  EXPECT_EQ(printable(std::string(300, 'x')), std::string(200, 'x') + "...");
}

TEST(Safetensors, WrittenFileReadsBackWithEveryDtype) {
  const TemporaryFolder folder;
  std::vector<TensorInfo> tensors;
  for (const auto* name : {"F64", "I64", "U64", "F32", "I32", "U32", "F16", "BF16", "I16", "U16", "BOOL", "U8", "I8",
                           "F8_E4M3", "F8_E5M2"}) {
    tensors.push_back({name, *dtype_from_name(name), {3, 2}});
  }
  tensors.push_back({"scalar", Dtype::kU8, {}});
  tensors.push_back({"empty", Dtype::kF32, {0, 7}});
  write_safetensors(folder / "a.safetensors", tensors, 'x');

  const SafetensorsFile file(folder / "a.safetensors");
  EXPECT_EQ(file.tensors().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  for (const auto& tensor : tensors) {
    SCOPED_TRACE(tensor.name);
    const auto* stored = file.find(tensor.name);
    ASSERT_NE(stored, nullptr);
    EXPECT_EQ(stored->info.dtype, tensor.dtype);
    EXPECT_EQ(stored->info.shape, tensor.shape);
    EXPECT_EQ(file.bytes(*stored).size(), tensor.bytes());
    for (const auto byte : file.bytes(*stored)) EXPECT_EQ(byte, std::byte{'x'});
  }
  EXPECT_EQ(file.find("none"), nullptr);
}

TEST(Safetensors, WriterAlignsTheData) {
  const TemporaryFolder folder;
  for (std::size_t length = 1; length < 12; ++length) {
    write_safetensors(folder / "a.safetensors", {{std::string(length, 'n'), Dtype::kF64, {2}}});
    EXPECT_EQ(SafetensorsFile(folder / "a.safetensors").tensors()[0].begin % 8, 0u);
  }
}

TEST(Safetensors, WritingToTheMappingLeavesTheFileAlone) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a.safetensors", {{"w", Dtype::kU8, {4}}}, 'x');
  const SafetensorsFile file(folder / "a.safetensors");
  file.bytes(*file.find("w"))[0] = std::byte{'y'};
  EXPECT_EQ(file.bytes(*file.find("w"))[0], std::byte{'y'});
  const SafetensorsFile again(folder / "a.safetensors");
  EXPECT_EQ(again.bytes(*again.find("w"))[0], std::byte{'x'});
}

TEST(Safetensors, KeepsMetadata) {
  const auto file = raw_safetensors(
      R"({"__metadata__":{"format":"pt","note":"\u00e9"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   )", 1);
  const auto header = parse_safetensors_header(bytes_of(file), "a");
  EXPECT_EQ(header.metadata.at("note"), "\u00e9");
  EXPECT_EQ(header.tensors.size(), 1u);
}

TEST(Safetensors, TruncatedFileSaysHowMuchIsThere) {
  EXPECT_EQ(header_error(R"({"w":{"dtype":"F32","shape":[1225000000],"data_offsets":[0,4900000000]}})", 0),
            "a.safetensors ends early (0.0 of 4.9 GB). Download it again.");
  EXPECT_EQ(header_error(R"({"w":{"dtype":"U8","shape":[100],"data_offsets":[0,100]}})", 60),
            "a.safetensors ends early (125 of 165 bytes). Download it again.");
  EXPECT_THAT(data_error([] { parse_safetensors_header(bytes_of("abc"), "a.safetensors"); }),
              HasSubstr("ends early (3 of 8 bytes)"));
  EXPECT_THAT(
      data_error([] { parse_safetensors_header(bytes_of(raw_safetensors("{}  ", 0).substr(0, 10)), "a.safetensors"); }),
      HasSubstr("ends early (10 of 12 bytes)"));
}

TEST(Safetensors, RefusesAHeaderLargerThanItsLimit) {
  std::string file(16, '\xff');
  EXPECT_THAT(data_error([&] { parse_safetensors_header(bytes_of(file), "a.safetensors"); }),
              HasSubstr("not a safetensors file"));
}

TEST(Safetensors, KnowsAGitLfsPointer) {
  EXPECT_THAT(data_error([] {
                parse_safetensors_header(bytes_of("version https://git-lfs.github.com/spec/v1\n"), "a.safetensors");
              }),
              HasSubstr("git lfs pull"));
}

TEST(Safetensors, RefusesHolesOverlapsAndBytesThatNobodyOwns) {
  EXPECT_THAT(
      header_error(
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
          5),
      AllOf(HasSubstr("\"b\""), HasSubstr("damaged")));
  EXPECT_THAT(
      header_error(
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
          3),
      HasSubstr("\"b\""));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3), HasSubstr("\"a\""));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 5),
              HasSubstr("3 bytes follow the last tensor"));
}

TEST(Safetensors, RefusesEntriesThatDoNotAddUp) {
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4), HasSubstr("takes 8 bytes"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8),
              HasSubstr("data_offsets are [8, 0]"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"Q4","shape":[2],"data_offsets":[0,8]}})", 8), HasSubstr("unknown dtype"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}})", 8), HasSubstr("not negative"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8),
              HasSubstr("whole numbers"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8),
              HasSubstr("list of at most 64"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[2]}})", 8),
              HasSubstr("expected dtype, shape and data_offsets"));
  EXPECT_THAT(header_error(R"({"a":1})", 0), HasSubstr("expected dtype, shape and data_offsets"));
  EXPECT_THAT(header_error(R"([1])", 0), HasSubstr("must be a JSON object"));
  EXPECT_THAT(header_error(R"({"__metadata__":{"a":1}})", 0), HasSubstr("must be a string"));
  EXPECT_THAT(
      header_error(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          2),
      HasSubstr("\"a\" stands twice"));
}

TEST(Safetensors, CountsWithoutOverflow) {
  // 2^32 * 2^32 elements wrap to 0 in 64 bits; the same hidden behind a zero.
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0),
              HasSubstr("63 bits"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})", 0),
              HasSubstr("63 bits"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0),
              HasSubstr("too large"));
  EXPECT_THAT(
      header_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}})", 1),
      HasSubstr("too large"));
}

TEST(Safetensors, WriterRefusesANameTwice) {
  const TemporaryFolder folder;
  const std::vector<TensorInfo> tensors = {{"w", Dtype::kU8, {1}}, {"w", Dtype::kU8, {1}}};
  EXPECT_THROW(SafetensorsWriter(folder / "a.safetensors", tensors), Error);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Safetensors, AnAbandonedWriterLeavesNothing) {
  const TemporaryFolder folder;
  {
    SafetensorsWriter writer(folder / "a.safetensors", std::vector<TensorInfo>{{"w", Dtype::kU8, {4}}});
    writer.write(bytes_of("ab"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace sluice
