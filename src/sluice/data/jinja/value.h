// SPDX-License-Identifier: Apache-2.0
// The values of a template: what Python has, as far as chat templates need it. Everything but a namespace is immutable
// and shared. A namespace or a callable cannot be put into a container, so values form no cycles, and a container may
// nest kMaxDepth deep, so that neither comparison nor destruction runs out of stack. It may weigh kMaxWeight, so that a
// list that holds one list many times, over and over, cannot be printed or compared without end. A tuple is a list.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "sluice/data/jinja/text.h"

namespace sluice::jinja {

// What went wrong, without the place: the interpreter adds template and line.
struct Problem : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Value;
class Scope;
struct Statement;

struct Undefined {
  std::string name;  // what was looked up, for messages
};
struct None {};
struct List;
struct Dict;
struct Namespace;

// A global function, a method bound to a value, or a macro with the scope in which it was defined.
struct Callable {
  std::string name;
  std::shared_ptr<const Value> self;
  const Statement* macro = nullptr;
  Scope* scope = nullptr;
};

class Value {
 public:
  using Storage = std::variant<Undefined, None, bool, std::int64_t, double, std::shared_ptr<const Text>,
                               std::shared_ptr<const List>, std::shared_ptr<const Dict>, std::shared_ptr<Namespace>,
                               std::shared_ptr<const Callable>>;

  Value() = default;
  Value(Undefined undefined) : storage_(std::move(undefined)) {}
  Value(None none) : storage_(none) {}
  Value(bool boolean) : storage_(boolean) {}
  Value(std::int64_t integer) : storage_(integer) {}
  Value(double number) : storage_(number) {}
  Value(Text text) : storage_(std::make_shared<const Text>(std::move(text))) {}
  Value(List list);
  Value(Dict dict);
  Value(std::shared_ptr<Namespace> space) : storage_(std::move(space)) {}
  Value(Callable callable) : storage_(std::make_shared<const Callable>(std::move(callable))) {}
  Value(const char*) = delete;  // would become a bool

  template <typename T>
  const T* as() const {
    return std::get_if<T>(&storage_);
  }
  const Text* text() const { return pointee<const Text>(); }
  const List* list() const { return pointee<const List>(); }
  const Dict* dict() const { return pointee<const Dict>(); }
  Namespace* space() const { return pointee<Namespace>(); }
  const Callable* callable() const { return pointee<const Callable>(); }

  bool is_undefined() const { return as<Undefined>() != nullptr; }
  bool is_none() const { return as<None>() != nullptr; }
  bool is_number() const;       // as in Python, True and False are numbers too
  double number() const;        // of a number
  const char* type() const;     // for messages: "a string", "a list"
  int depth() const;            // 0 for anything that holds nothing
  std::int64_t weight() const;  // about the bytes of it written out, shared parts counted each time

 private:
  template <typename T>
  T* pointee() const {
    const auto* pointer = as<std::shared_ptr<T>>();
    return pointer ? pointer->get() : nullptr;
  }
  Storage storage_;
};

constexpr int kMaxDepth = 200;
constexpr std::int64_t kMaxWeight = 128'000'000;  // twice the longest record of a data file

struct List {
  List() = default;
  explicit List(std::vector<Value> elements);  // Problem if too deep, too heavy or if one cannot be stored
  std::vector<Value> elements;
  int depth = 1;
  std::int64_t weight = 1;
};

// In the order of insertion. Keys are strings, as in JSON.
struct Dict {
  void set(Text key, Value value);  // Problem as for List
  const Value* find(const std::string& key) const;
  std::vector<std::pair<Text, Value>> entries;
  std::unordered_map<std::string, std::size_t> index;
  int depth = 1;
  std::int64_t weight = 1;
  int message = -1;  // its place in the conversation, if it is one of the messages
};

struct Namespace {
  void set(const std::string& key, Value value);  // Problem if the value cannot be stored
  std::unordered_map<std::string, Value> attributes;
};

bool is_true(const Value& value);
bool equal(const Value& left, const Value& right);
bool less(const Value& left, const Value& right);  // Problem unless two numbers or two strings
bool contains(const Value& container,
              const Value& element);             // `element in container`; Problem if there is no such thing
std::vector<Value> iterate(const Value& value);  // elements, keys or characters; Problem if there are none

Text to_text(const Value& value);  // Python's str()
std::string number_text(double number);

struct JsonStyle {
  int indent = -1;  // below 0: one line
  std::string item_separator = ", ", key_separator = ": ";
  bool ascii = false, sort_keys = false;
};
std::string to_json(const Value& value, const JsonStyle& style = {});  // Python's json.dumps

// Every string of it is data. Problem if it is nested too deep or holds an integer of more than 64 bits.
Value from_json(const nlohmann::ordered_json& json);

}  // namespace sluice::jinja
