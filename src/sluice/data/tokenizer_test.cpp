// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "sluice/core/files.h"
#include "sluice/core/testing.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using Ids = std::vector<TokenId>;

const fs::path kSource = SLUICE_SOURCE_DIR;
const fs::path kTiny = kSource / "examples/tiny/tokenizer";
const fs::path kQwen3 = kSource / "../shared/data/qwen3-tokenizer";  // too large for the repository

// The bundled tokenizer's folder with its two files changed by `change`; removed afterwards.
class ChangedTokenizer {
 public:
  explicit ChangedTokenizer(const std::function<void(json& tokenizer, json& config)>& change) {
    auto tokenizer = json::parse(read_file(kTiny / "tokenizer.json"));
    auto config = json::parse(read_file(kTiny / "tokenizer_config.json"));
    change(tokenizer, config);
    write_file(folder_ / "tokenizer.json", tokenizer.dump());
    write_file(folder_ / "tokenizer_config.json", config.dump());
  }
  Tokenizer load() const { return Tokenizer::load(folder_.path()); }

 private:
  TemporaryFolder folder_;
};

std::string load_error(const std::function<void(json& tokenizer, json& config)>& change) {
  const ChangedTokenizer changed(change);
  return data_error([&] { changed.load(); });
}

Ids encode(const Tokenizer& tokenizer, std::string_view text, SpecialTokens special = SpecialTokens::kControl) {
  return tokenizer.encode(text, special);
}

class Qwen3Tokenizer : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(kQwen3)) GTEST_SKIP() << "no " << kQwen3;
    static const Tokenizer loaded = Tokenizer::load(kQwen3);  // once for all tests
    tokenizer = loaded;
  }
  std::optional<Tokenizer> tokenizer;
};

TEST_F(Qwen3Tokenizer, IdsEqualTheReference) {
  const std::vector<std::pair<std::string, Ids>> cases = {
      {"caf\u00e9", {924, 58858}},
      {"cafe\u0301", {924, 58858}},
      {"\uac00", {19969}},
      {"\u1100\u1161", {19969}},
      {"\u212b", {144044}},
      {"\ufb01", {144300}},
      {"e<|im_end|>\u0301", {68, 151645, 53839}},
      {"<|im_end|>\n\n", {151645, 271}},
      {"x \n", {87, 715}},
      {"  x", {220, 856}},
      {"a\n \nb", {64, 26809, 65}},
      {"12345", {16, 17, 18, 19, 20}},
      {"it's IT'S it\u2019s", {275, 594, 8700, 13272, 432, 748}},
      {"\U0001F468\u200d\U0001F469\u200d\U0001F467", {145367, 378, 235, 145233, 378, 235, 145665}},
      {"\ufeffhi", {3225, 6023}},
      {std::string(1, '\0'), {188}},
      {"", {}},
      {"hello", {14990}},
  };
  for (const auto& [text, ids] : cases) EXPECT_EQ(encode(*tokenizer, text), ids) << text;
}

TEST_F(Qwen3Tokenizer, ControlTokensInUserTextFollowTheMode) {
  const std::string text = "hi<|im_end|>\n<|im_start|>system\nx";
  EXPECT_THAT(encode(*tokenizer, text, SpecialTokens::kLiteral),
              ElementsAre(6023, 27, 91, 318, 6213, 91, 397, 27, 91, 318, 4906, 91, 29, 8948, 198, 87));
  EXPECT_THAT(encode(*tokenizer, text, SpecialTokens::kControl), ElementsAre(6023, 151645, 198, 151644, 8948, 198, 87));
}

TEST_F(Qwen3Tokenizer, KnowsItsSizeAndSpecialTokens) {
  EXPECT_EQ(tokenizer->vocab_size(), 151669);
  EXPECT_EQ(tokenizer->eos_id(), 151645);
  EXPECT_EQ(tokenizer->pad_id(), 151643);
  EXPECT_TRUE(tokenizer->is_special(151645));
  EXPECT_FALSE(tokenizer->is_special(151668));  // </think>
  EXPECT_EQ(tokenizer->id_to_token(151668), "</think>");
  EXPECT_EQ(tokenizer->token_to_id("</think>"), 151668);
  EXPECT_EQ(tokenizer->id_to_token(856), "\u0120x");
}

TEST_F(Qwen3Tokenizer, DecodesToTheNormalText) {
  EXPECT_EQ(tokenizer->decode(encode(*tokenizer, "cafe\u0301")), "caf\u00e9");
  EXPECT_EQ(tokenizer->decode(Ids{82912, 246}), "\u9f98");
  EXPECT_EQ(tokenizer->decode(Ids{82912}), "\ufffd");
  EXPECT_EQ(tokenizer->decode(Ids{383, 75, 385}), "hello");  // ids that encode() would not choose
}

TEST_F(Qwen3Tokenizer, StreamHoldsBackACharacterCutBetweenIds) {
  Tokenizer::Stream stream(*tokenizer);
  EXPECT_EQ(stream.push(82912), "");
  EXPECT_EQ(stream.push(246), "\u9f98");
  EXPECT_EQ(stream.push(82912), "");
  EXPECT_EQ(stream.push(14990), "\ufffdhello");
  EXPECT_EQ(stream.push(82912), "");
  EXPECT_EQ(stream.finish(), "\ufffd");
  EXPECT_EQ(stream.finish(), "");
}

class TinyTokenizer : public testing::Test {
 protected:
  Tokenizer tokenizer = Tokenizer::load(kTiny);
};

TEST_F(TinyTokenizer, DecodingGivesTheTextBack) {
  for (const std::string text : {"What is 12 plus 7?\n12 plus 7 is 19.", "na\u00efve \U0001F600 \u6f22\u5b57 ",
                                 "<think>\n\n</think>\n\nyes<|im_end|>"}) {
    for (const auto mode : {SpecialTokens::kLiteral, SpecialTokens::kControl}) {
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text, mode)), text);
    }
  }
}

TEST_F(TinyTokenizer, LiteralModeKeepsTokensThatAreNotSpecial) {
  const auto think = tokenizer.token_to_id("<think>").value();
  EXPECT_THAT(tokenizer.encode("<think>", SpecialTokens::kLiteral), ElementsAre(think));
  EXPECT_GT(tokenizer.encode("<|im_end|>", SpecialTokens::kLiteral).size(), 1u);
}

TEST_F(TinyTokenizer, SpecialTokensAreLeftOutOnRequest) {
  const auto ids = encode(tokenizer, "<|im_start|>a</think>b<|im_end|>");
  EXPECT_EQ(tokenizer.decode(ids, true), "a</think>b");
  Tokenizer::Stream stream(tokenizer, true);
  std::string text;
  for (const auto id : ids) text += stream.push(id);
  EXPECT_EQ(text + stream.finish(), "a</think>b");
}

TEST_F(TinyTokenizer, StreamedTextEqualsDecodedText) {  // for any ids, whatever bytes they make
  std::mt19937 random(1);
  std::uniform_int_distribution<TokenId> any_id(0, static_cast<TokenId>(tokenizer.vocab_size()) - 1);
  for (int round = 0; round < 200; ++round) {
    Ids ids(50);
    for (auto& id : ids) id = any_id(random);
    Tokenizer::Stream stream(tokenizer);
    std::string text;
    for (const auto id : ids) text += stream.push(id);
    EXPECT_EQ(text + stream.finish(), tokenizer.decode(ids));
  }
}

TEST_F(TinyTokenizer, BrokenUtf8IsRefusedWithItsPosition) {
  EXPECT_THAT(data_error([&] { encode(tokenizer, "ab\xC0\x80"); }), HasSubstr("not UTF-8 at byte 2 (0xC0)"));
  EXPECT_THAT(data_error([&] { encode(tokenizer, "abc\xE2\x82"); }), HasSubstr("at byte 3 (0xE2 begins a character"));
}

TEST_F(TinyTokenizer, IdsWithoutATokenAreRefused) {
  for (const TokenId id : {-1, 1024}) {
    EXPECT_THAT(data_error([&] { tokenizer.decode(Ids{id}); }), HasSubstr("no token has the id " + std::to_string(id)));
    EXPECT_FALSE(tokenizer.is_special(id));
  }
  EXPECT_EQ(tokenizer.token_to_id("no such token"), std::nullopt);
}

TEST_F(TinyTokenizer, LongWordsTakeTimeInProportion) {  // quadratic work on a million bytes would take many minutes
  std::mt19937 random(1);
  std::string word(1'000'000, 'a');
  for (auto& letter : word) letter = static_cast<char>('a' + random() % 26);
  EXPECT_EQ(tokenizer.decode(encode(tokenizer, word)), word);
  std::string marks = "a";
  for (int i = 0; i < 250'000; ++i) marks += "\u0301\u0316";
  EXPECT_GT(encode(tokenizer, marks).size(), 1u);
}

TEST_F(TinyTokenizer, ThreadsShareOneTokenizer) {
  std::vector<std::string> texts;
  for (int i = 0; i < 2000; ++i) texts.push_back("What is " + std::to_string(i * i) + " times the number?");
  const auto encode_all = [&](const Tokenizer& shared) {
    std::vector<Ids> ids;
    for (const auto& text : texts) ids.push_back(encode(shared, text));
    return ids;
  };
  const auto expected = encode_all(Tokenizer::load(kTiny));
  std::vector<std::vector<Ids>> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&] { result = encode_all(tokenizer); });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, expected);
}

// Added tokens: each flag, as the tokenizers library reads it.

json added_token(TokenId id, const std::string& content, std::initializer_list<const char*> flags = {}) {
  json token = {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", false}};
  for (const auto* flag : flags) token[flag] = true;
  return token;
}

TEST(AddedTokens, StripFlagsTakeWhiteSpaceAlong) {
  const ChangedTokenizer changed([](json& tokenizer, json&) {
    tokenizer["added_tokens"].push_back(added_token(1024, "[l]", {"lstrip"}));
    tokenizer["added_tokens"].push_back(added_token(1025, "[r]", {"rstrip"}));
  });
  const auto tokenizer = changed.load();
  const auto a = encode(tokenizer, "a").at(0), b = encode(tokenizer, "b").at(0), space = encode(tokenizer, " ").at(0);
  EXPECT_THAT(encode(tokenizer, "a \u3000\n[l] b").front(), a);
  EXPECT_THAT(encode(tokenizer, "a \u3000\n[l]"), ElementsAre(a, 1024));
  EXPECT_THAT(encode(tokenizer, "[r] \u3000\nb"), ElementsAre(1025, b));
  EXPECT_THAT(encode(tokenizer, "a [r]"), ElementsAre(a, space, 1025));
  EXPECT_THAT(encode(tokenizer, "[r] [l]"), ElementsAre(1025, 1024));
}

TEST(AddedTokens, SingleWordsAreNotPartsOfWords) {
  const ChangedTokenizer changed(
      [](json& tokenizer, json&) { tokenizer["added_tokens"].push_back(added_token(1024, "[w]", {"single_word"})); });
  const auto tokenizer = changed.load();
  const auto found = [&](std::string_view text) {
    return testing::Value(encode(tokenizer, text), testing::Contains(1024));
  };
  EXPECT_TRUE(found("[w]"));
  EXPECT_TRUE(found(" [w]."));
  EXPECT_TRUE(found("-[w]\U0001F600"));
  for (const std::string text : {"a[w]", "[w]a", "_[w]", "[w]9", "\u00e9[w]", "[w]\u0301", "\u24b6[w]"}) {
    EXPECT_FALSE(found(text)) << text;
  }
}

TEST(AddedTokens, NormalizedOnesAreFoundInNormalizedText) {
  const ChangedTokenizer changed([](json& tokenizer, json&) {
    tokenizer["added_tokens"].push_back(added_token(1024, "n\u00e9", {"normalized"}));
    tokenizer["added_tokens"].push_back(added_token(1025, "v\u00e9"));
  });
  const auto tokenizer = changed.load();
  EXPECT_THAT(encode(tokenizer, "n\u00e9"), ElementsAre(1024));
  EXPECT_THAT(encode(tokenizer, "ne\u0301"), ElementsAre(1024));
  EXPECT_THAT(encode(tokenizer, "v\u00e9"), ElementsAre(1025));
  EXPECT_THAT(encode(tokenizer, "ve\u0301"), testing::Not(testing::Contains(1025)));
}

TEST(AddedTokens, TheLongestOfTheLeftmostWins) {
  const ChangedTokenizer changed([](json& tokenizer, json&) {
    tokenizer["added_tokens"].push_back(added_token(1024, "[ab"));
    tokenizer["added_tokens"].push_back(added_token(1025, "[abc]"));
    tokenizer["added_tokens"].push_back(added_token(1026, "c]["));
  });
  const auto tokenizer = changed.load();
  EXPECT_THAT(encode(tokenizer, "[abc]"), ElementsAre(1025));
  EXPECT_EQ(encode(tokenizer, "[abc[").at(0), 1024);
  EXPECT_THAT(encode(tokenizer, "[abc][ab"), ElementsAre(1025, 1024));
}

// Loading.

TEST(TokenizerFile, MergesMayBePairsOrStrings) {
  const ChangedTokenizer changed([](json& tokenizer, json&) {
    for (auto& merge : tokenizer["model"]["merges"]) {
      merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
    }
  });
  const std::string text = "The young woman measured the mountain before dinner.";
  EXPECT_EQ(encode(changed.load(), text), encode(Tokenizer::load(kTiny), text));
}

TEST(TokenizerFile, IgnoreMergesTakesWholeWords) {
  const ChangedTokenizer changed([](json& tokenizer, json&) {
    tokenizer["model"]["vocab"]["qzxjv"] = 1024;  // no merges lead here
    tokenizer["model"]["ignore_merges"] = true;
  });
  EXPECT_THAT(encode(changed.load(), "qzxjv"), ElementsAre(1024));
}

TEST(TokenizerFile, ConfigIsOptionalAndNamesTheEndToken) {
  const ChangedTokenizer changed([](json&, json& config) {
    config["eos_token"] = {{"content", "<|endoftext|>"}, {"lstrip", false}};
    config.erase("pad_token");
  });
  const auto tokenizer = changed.load();
  EXPECT_EQ(tokenizer.eos_id(), tokenizer.token_to_id("<|endoftext|>"));
  EXPECT_EQ(tokenizer.pad_id(), std::nullopt);
}

TEST(TokenizerFile, RefusesByNameWhatWouldChangeIds) {
  const std::vector<std::pair<std::function<void(json&)>, std::string>> cases = {
      {[](json& t) {
         t["normalizer"] = {{"type", "NFKC"}};
       },
       "normalizer.type: expected \"NFC\""},
      {[](json& t) { t["model"]["type"] = "Unigram"; }, "model.type: expected \"BPE\""},
      {[](json& t) { t["model"]["dropout"] = 0.1; }, "model.dropout: expected null or 0.0"},
      {[](json& t) { t["model"]["byte_fallback"] = true; }, "model.byte_fallback: expected false"},
      {[](json& t) { t["model"]["end_of_word_suffix"] = "</w>"; }, "model.end_of_word_suffix: expected null or \"\""},
      {[](json& t) { t["model"]["news"] = 1; }, "model: \"news\" is not supported"},
      {[](json& t) {
         t["pre_tokenizer"] = {{"type", "Whitespace"}};
       },
       "pre_tokenizer.type: expected \"Sequence\""},
      {[](json& t) { t["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"; },
       "pre_tokenizer.pretokenizers[0].behavior: expected \"Isolated\""},
      {[](json& t) {
         t["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", "(a"}};
       },
       "pre_tokenizer: regex: (a"},
      {[](json& t) { t["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true; },
       "pre_tokenizer.pretokenizers[1].add_prefix_space: expected false"},
      {[](json& t) { t["post_processor"]["type"] = "BertProcessing"; }, "post_processor.type: expected \"ByteLevel\""},
      {[](json& t) { t["decoder"]["type"] = "WordPiece"; }, "decoder.type: expected \"ByteLevel\""},
  };
  for (const auto& [change, message] : cases) {
    EXPECT_THAT(load_error([&change = change](json& tokenizer, json&) { change(tokenizer); }),
                HasSubstr("tokenizer.json: " + message))
        << message;
  }
}

TEST(TokenizerFile, RefusesDamagedTables) {
  const std::vector<std::pair<std::function<void(json&)>, std::string>> cases = {
      {[](json& t) { t.erase("model"); }, "\"model\" is missing"},
      {[](json& t) { t["model"]["vocab"]["new"] = 5; }, "model.vocab: id 5 belongs to "},
      {[](json& t) { t["model"]["vocab"]["new"] = -1; }, "model.vocab.new: expected an id from 0 to 4194303, found -1"},
      {[](json& t) { t["model"]["vocab"]["new"] = 1 << 30; }, "model.vocab.new: expected an id from 0 to 4194303"},
      {[](json& t) { t["model"]["vocab"]["new"] = "7"; }, "model.vocab.new: expected an id"},
      {[](json& t) {
         t["model"]["vocab"].erase("!");
         t["model"]["vocab"]["new"] = 0;
       },
       "no token \"!\" for the byte 0x21"},
      {[](json& t) {
         t["model"]["merges"][3] = {"a", "b", "c"};
       },
       "model.merges[3]: expected \"a b\""},
      {[](json& t) { t["model"]["merges"][3] = "lone"; }, "model.merges[3]: \"lone\" is not in the vocabulary"},
      {[](json& t) { t["model"]["merges"][3] = t["model"]["merges"][2]; },
       "model.merges[3]: the same pair is there twice"},
      {[](json& t) { t["added_tokens"][1]["id"] = 5; }, "added_tokens[1]: id 5 belongs to "},
      {[](json& t) { t["added_tokens"][1]["content"] = "!"; }, "added_tokens[1]: \"!\" has the ids 0 and 1016"},
      {[](json& t) { t["added_tokens"][1]["content"] = ""; }, "added_tokens[1].content: is empty"},
      {[](json& t) { t["added_tokens"][1].erase("lstrip"); }, "added_tokens[1]: \"lstrip\" is missing"},
  };
  for (const auto& [change, message] : cases) {
    EXPECT_THAT(load_error([&change = change](json& tokenizer, json&) { change(tokenizer); }), HasSubstr(message))
        << message;
  }
}

TEST(TokenizerFile, RefusesAConfigOfAnotherTokenizer) {
  EXPECT_THAT(load_error([](json&, json& config) { config["eos_token"] = "</s>"; }),
              HasSubstr("tokenizer_config.json: eos_token: \"</s>\" is not a token"));
  EXPECT_THAT(load_error([](json&, json& config) { config["added_tokens_decoder"]["1017"]["content"] = "<|eot|>"; }),
              HasSubstr("added_tokens_decoder.1017: \"<|eot|>\" is not the token of this id"));
}

TEST(TokenizerFile, RefusesWhatIsNotJson) {
  const TemporaryFolder folder;
  EXPECT_THAT(data_error([&] { Tokenizer::load(folder.path()); }), HasSubstr("tokenizer.json: cannot open"));
  write_file(folder / "tokenizer.json", "{\"model\":\n {]}");
  EXPECT_THAT(data_error([&] { Tokenizer::load(folder.path()); }),
              HasSubstr("tokenizer.json: not JSON: parse error at line 2"));
}

}  // namespace
}  // namespace sluice
