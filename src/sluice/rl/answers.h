// SPDX-License-Identifier: Apache-2.0
// Where an answer to a mathematical question stands in a text, and when two answers are equal: the rules of GSM8K
// (Cobbe et al. 2021) and MATH (Hendrycks et al. 2021).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace sluice {

// The answer that a GSM8K record gives: what follows the last "####", or the whole text without one. Absent if it is no
// decimal number, commas and a currency sign aside.
std::optional<std::string> gsm8k_gold(std::string_view answer);

// The number that a response gives, in its last 300 characters: strict, behind the last "#### "; otherwise the last
// number there is. Absent if there is none. Without commas, "$" and a full stop at the end.
std::optional<std::string> gsm8k_strict(std::string_view response);
std::optional<std::string> gsm8k_flexible(std::string_view response);

// 18, 18.0, 018 and +18 are equal.
bool equal_decimals(std::string_view a, std::string_view b);

// The content of the last \boxed{} or \fbox{} whose braces balance.
std::optional<std::string> boxed_answer(std::string_view text);

// Equality of MATH answers after its clean-up of notation (spaces, \left, \dfrac, units, percent and dollar signs,
// \frac12, \sqrt3, text wrappers); numbers and fractions of numbers are compared as exact rationals, the elements of
// tuples and intervals one by one. Two ways to write one expression, such as x+1 and 1+x, are not equal.
bool equal_math(std::string_view a, std::string_view b);

}  // namespace sluice
