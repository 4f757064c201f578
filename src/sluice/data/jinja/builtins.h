// SPDX-License-Identifier: Apache-2.0
// Filters, tests, methods and functions that a template may call. Each throws Problem, with its own name in front.
#pragma once

#include <string>
#include <string_view>

#include "sluice/data/jinja/interpreter.h"

namespace sluice::jinja {

Value call_filter(Interpreter& interpreter, const std::string& name, const Value& input, const Arguments& arguments);
bool call_test(const std::string& name, const Value& input, const Arguments& arguments);
Value call_function(Interpreter& interpreter, const std::string& name, const Arguments& arguments);
Value call_method(Interpreter& interpreter, const std::string& name, const Value& self, const Arguments& arguments);

bool is_function(const std::string& name);
bool has_method(const Value& self, const std::string& name);

// base.name and base[key]; undefined if there is no such thing. Problem if the base itself is undefined.
Value attribute(const Value& base, const std::string& name);
Value element(const Value& base, const Value& key);

// Reads the arguments of a call in the order of its parameters, by position or by name.
class ArgumentReader {
 public:
  ArgumentReader(std::string_view callee, const Arguments& arguments) : callee_(callee), arguments_(arguments) {}
  const Value* next(std::string_view name);  // null if not given
  const Value& required(std::string_view name);
  const Text& text(std::string_view name);  // a required string
  std::int64_t integer(std::string_view name, std::int64_t otherwise);
  bool boolean(std::string_view name, bool otherwise);
  void done() const;  // Problem if anything is left over

 private:
  std::string callee_;
  const Arguments& arguments_;
  std::size_t position_ = 0;
  std::size_t named_used_ = 0;
};

// On strings, by characters; what they return keeps the origin of each byte.
Text strip(const Text& text, const Text* characters, bool left, bool right);
Text replace(Interpreter& interpreter, const Text& text, const Text& from, const Text& to, std::int64_t count);
Text change_case(const Text& text, bool upper);
Text capitalize(const Text& text);
Text join(Interpreter& interpreter, const std::vector<Value>& elements, const Text& separator);

}  // namespace sluice::jinja
