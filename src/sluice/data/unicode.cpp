// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cassert>
#include <iterator>
#include <vector>

#include "sluice/data/unicode_tables.h"
#include "sluice/data/utf8.h"

namespace sluice {
namespace {

template <std::size_t N>
bool contains(const CodePointRange (&table)[N], char32_t code_point) {
  const auto* after = std::upper_bound(std::begin(table), std::end(table), code_point,
                                       [](char32_t c, const CodePointRange& range) { return c < range.low; });
  return after != std::begin(table) && code_point <= std::prev(after)->high;
}

// How a code point behaves between its neighbours in NFC.
enum class Joining {
  kNever,        // stands alone on both sides
  kWithNext,     // begins something new, and may compose with what follows
  kWithPrevious  // may also change or move because of what stands before it
};

// A cheap answer on the safe side: most text never reaches the tables of utf8proc.
Joining joining(char32_t c) {
  if (c < 0x300) return Joining::kWithNext;                // all marks and all second halves of compositions lie above
  if (c >= 0x3400 && c <= 0x9FFF) return Joining::kNever;  // CJK ideographs
  return contains(kNotNormalized, c) ? Joining::kNever : Joining::kWithPrevious;
}

int combining_class(utf8proc_int32_t code_point) { return utf8proc_get_property(code_point)->combining_class; }

// Canonical decomposition, canonical ordering, canonical composition. utf8proc's own call orders marks with a quadratic
// sort, which a long run of marks would turn into a standstill; so the ordering is done here.
void append_nfc(std::string_view run, std::string& out) {
  constexpr utf8proc_ssize_t kMostParts = 32;  // a canonical decomposition has at most 4
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  std::vector<utf8proc_int32_t> points;
  points.reserve(run.size());
  for (std::size_t position = 0; position < run.size();) {
    const auto step = utf8_step(run, position);
    utf8proc_int32_t parts[kMostParts];
    int boundary_class = 0;  // belongs to grapheme breaking, which is not asked for
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.code_point), parts, kMostParts,
                                               options, &boundary_class);
    assert(count >= 1 && count <= kMostParts);
    points.insert(points.end(), parts, parts + count);
    position += step.length;
  }
  for (auto first = points.begin(); first != points.end();) {
    const auto is_starter = [](utf8proc_int32_t c) { return combining_class(c) == 0; };
    first = std::find_if_not(first, points.end(), is_starter);
    const auto last = std::find_if(first, points.end(), is_starter);
    std::stable_sort(first, last, [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    first = last;
  }
  const auto composed = utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()), options);
  assert(composed >= 0);
  for (utf8proc_ssize_t i = 0; i < composed; ++i) append_utf8(out, static_cast<char32_t>(points[i]));
}

}  // namespace

std::string to_nfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::size_t run_begin = 0;  // text[0, run_begin) is in `out`
  bool run_is_plain = true;   // nothing in text[run_begin, position) can change
  const auto finish_run = [&](std::size_t end) {
    const auto run = text.substr(run_begin, end - run_begin);
    if (run_is_plain) {
      out += run;
    } else {
      append_nfc(run, out);
    }
    run_begin = end;
    run_is_plain = true;
  };
  auto previous = Joining::kNever;
  for (std::size_t position = 0; position < text.size();) {
    const auto step = utf8_step(text, position);
    const auto current = joining(step.code_point);
    // A run is cut before every character that begins something new; but a plain run grows on, so that it is copied
    // once.
    if (current == Joining::kWithPrevious) {
      if (run_is_plain) {
        std::size_t base = position;  // the character before may compose with this one
        if (previous == Joining::kWithNext) {
          do --base;
          while (base > run_begin && (static_cast<unsigned char>(text[base]) & 0xC0) == 0x80);
        }
        finish_run(base);
        run_is_plain = false;
      }
    } else if (!run_is_plain) {
      finish_run(position);
    }
    previous = current;
    position += step.length;
  }
  finish_run(text.size());
  return out;
}

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_word_character(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      break;
  }
  constexpr CodePointRange kOthers[] = {{0x200C, 0x200D},  // joiners, then letters in circles and squares
                                        {0x24B6, 0x24E9},
                                        {0x1F130, 0x1F149},
                                        {0x1F150, 0x1F169},
                                        {0x1F170, 0x1F189}};
  return contains(kOthers, c) || contains(kNewerLetters, c) || contains(kNewerMarks, c) || contains(kNewerNumbers, c);
}

}  // namespace sluice
