// SPDX-License-Identifier: Apache-2.0
// How a setting is declared: once, next to the field that it fills. Reading files and the command line, --help, the run
// header, the saved run file and shell completion all read this declaration (sluice/config).
//
//   struct OptimOptions {
//     double lr = 1e-5;
//     Schedule schedule = Schedule::kCosine;
//     std::optional<std::int64_t> warmup_steps;
//     void describe(OptionList& option) {
//       option("lr", lr, "peak learning rate", {.synonyms = {"learning_rate"}, .min = 0});
//       option("schedule", schedule, "shape of the learning rate", {.choices = {"constant", "cosine", "linear"}});
//       option("warmup_steps", warmup_steps, "steps from 0 to the peak", {.unit = "steps", .min = 0});
//     }
//   };
//   struct RunOptions {
//     OptimOptions optim;
//     void describe(OptionList& option) { option("optim", optim, "optimizer"); }   // a section: optim.lr, ...
//   };
#pragma once

#include <cassert>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace sluice {

class OptionList;

// What a declaration may say besides name, field and sentence. Write the members in this order.
struct OptionTraits {
  std::string_view unit = {};                   // "tokens", "s", "GiB"
  std::vector<std::string_view> synonyms = {};  // other programs' names; an error about one of them names this option
  std::vector<std::string_view> choices = {};   // for text: what is allowed; for an enum: the names, in its order
  std::optional<double> min = {};               // smallest allowed number; of every element of a list
  std::optional<double> max = {};               // largest allowed number
  std::string_view alias = {};                  // short name on the command line: "model" for model.path
  bool required = false;                        // must not stay empty; for text, paths, lists and optionals
  bool input = false;                           // a path that the command reads: something must be there
  bool positional = false;                      // a command's one operand: `sluice inspect DIR` is --path DIR
  bool repeated = false;                        // a list of text: on the command line each use adds one, commas and all
  bool saved = true;                            // false: on the command line alone, never in a file
};

enum class ValueType { kBool, kInteger, kNumber, kText, kPath };
enum class ValueCount { kOne, kOptional, kMany };

// One value, whatever the field's type: paths and enums are text.
using Scalar = std::variant<bool, std::int64_t, double, std::string>;
using Scalars = std::vector<Scalar>;  // one value; none for an empty optional; any number for a list

// One declared setting, bound to its field.
struct Option {
  std::string name;           // dotted, from the root: "optim.lr"
  std::string_view sentence;  // what it does, for --help
  OptionTraits traits;
  ValueType type;
  ValueCount count;
  Scalars initial;                          // the field's value when it was declared: the default
  std::function<Scalars()> get;             // the field's value now
  std::function<void(const Scalars&)> set;  // takes checked values of the declared type and count
};

// A declared struct inside a struct.
struct OptionSection {
  std::string name;
  std::string_view sentence;
};

// A declared list of structs: an array of tables in a file, NAME.0.key on the command line.
struct OptionTables {
  std::string name;
  std::string_view sentence;
  std::function<std::size_t()> size;
  std::function<void(std::size_t)> resize;       // new entries hold their defaults
  std::function<OptionList(std::size_t)> entry;  // names begin with "NAME.index."; valid until resize()
  std::function<void(const std::function<void(const OptionList&)>&)> with_blank;  // the declaration, for --help
};

namespace detail {

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};

template <typename T>
concept Described = requires(T& t, OptionList& list) {
  t.describe(list);
};

template <typename T>
constexpr ValueType value_type() {
  static_assert(std::is_same_v<T, bool> || std::is_same_v<T, std::int64_t> || std::is_same_v<T, double> ||
                    std::is_same_v<T, std::string> || std::is_same_v<T, std::filesystem::path> || std::is_enum_v<T>,
                "an option is a bool, int64_t, double, string, path or enum; an optional or vector of one; or a struct "
                "with describe(), or a vector of one");
  if constexpr (std::is_same_v<T, bool>) return ValueType::kBool;
  if constexpr (std::is_same_v<T, std::int64_t>) return ValueType::kInteger;
  if constexpr (std::is_same_v<T, double>) return ValueType::kNumber;
  if constexpr (std::is_same_v<T, std::filesystem::path>) return ValueType::kPath;
  return ValueType::kText;
}

template <typename T>
Scalar to_scalar(const T& value, const std::vector<std::string_view>& choices) {
  if constexpr (std::is_enum_v<T>) {
    const auto index = static_cast<std::size_t>(value);
    assert(index < choices.size() && "an enum option needs a name in .choices for each enumerator");
    return std::string(choices[index]);
  } else if constexpr (std::is_same_v<T, std::filesystem::path>) {
    return value.string();
  } else {
    return value;
  }
}

template <typename T>
T from_scalar(const Scalar& scalar, const std::vector<std::string_view>& choices) {
  if constexpr (std::is_enum_v<T>) {
    std::size_t index = 0;
    while (index < choices.size() && choices[index] != std::get<std::string>(scalar)) ++index;
    assert(index < choices.size());
    return static_cast<T>(index);
  } else if constexpr (std::is_same_v<T, std::filesystem::path>) {
    return std::filesystem::path(std::get<std::string>(scalar));
  } else {
    return std::get<T>(scalar);
  }
}

}  // namespace detail

// The declarations of one struct and its sections, in order. Bound to the struct: it must outlive the list and stay
// put.
class OptionList {
 public:
  OptionList() = default;
  template <detail::Described T>
  explicit OptionList(T& options) {
    options.describe(*this);
  }

  // Declares `field` under `name`: a setting, a section (a struct with describe()) or a list of tables (a vector of
  // them). Texts must be literals: they are kept by reference.
  template <typename T>
  void operator()(std::string_view name, T& field, std::string_view sentence, const OptionTraits& traits = {}) {
    if constexpr (detail::Described<T>) {
      const auto outer = prefix_;
      sections_.push_back({prefix_ + std::string(name), sentence});
      prefix_ += std::string(name) + ".";
      field.describe(*this);
      prefix_ = outer;
    } else if constexpr (detail::IsVector<T>::value) {
      if constexpr (detail::Described<typename T::value_type>) {
        add_tables(name, field, sentence);
      } else {
        add_many(name, field, sentence, traits);
      }
    } else if constexpr (detail::IsOptional<T>::value) {
      add_optional(name, field, sentence, traits);
    } else {
      add_one(name, field, sentence, traits);
    }
  }

  const std::vector<Option>& options() const { return options_; }
  const std::vector<OptionSection>& sections() const { return sections_; }
  const std::vector<OptionTables>& tables() const { return tables_; }

 private:
  template <typename T>
  void add_one(std::string_view name, T& field, std::string_view sentence, OptionTraits traits) {
    auto get = [&field, choices = traits.choices] { return Scalars{detail::to_scalar(field, choices)}; };
    auto set = [&field, choices = traits.choices](const Scalars& values) {
      field = detail::from_scalar<T>(values.at(0), choices);
    };
    add(name, sentence, std::move(traits), detail::value_type<T>(), ValueCount::kOne, std::move(get), std::move(set));
  }

  template <typename T>
  void add_optional(std::string_view name, std::optional<T>& field, std::string_view sentence, OptionTraits traits) {
    auto get = [&field, choices = traits.choices] {
      return field ? Scalars{detail::to_scalar(*field, choices)} : Scalars{};
    };
    auto set = [&field, choices = traits.choices](const Scalars& values) {
      field = values.empty() ? std::nullopt : std::optional<T>(detail::from_scalar<T>(values[0], choices));
    };
    add(name, sentence, std::move(traits), detail::value_type<T>(), ValueCount::kOptional, std::move(get),
        std::move(set));
  }

  template <typename T>
  void add_many(std::string_view name, std::vector<T>& field, std::string_view sentence, OptionTraits traits) {
    auto get = [&field, choices = traits.choices] {
      Scalars values;
      for (const T& element : field) values.push_back(detail::to_scalar<T>(element, choices));
      return values;
    };
    auto set = [&field, choices = traits.choices](const Scalars& values) {
      field.clear();
      for (const auto& value : values) field.push_back(detail::from_scalar<T>(value, choices));
    };
    add(name, sentence, std::move(traits), detail::value_type<T>(), ValueCount::kMany, std::move(get), std::move(set));
  }

  template <typename T>
  void add_tables(std::string_view name, std::vector<T>& field, std::string_view sentence) {
    const auto full_name = prefix_ + std::string(name);
    tables_.push_back({.name = full_name,
                       .sentence = sentence,
                       .size = [&field] { return field.size(); },
                       .resize = [&field](std::size_t size) { field.resize(size); },
                       .entry =
                           [&field, full_name](std::size_t index) {
                             OptionList list;
                             list.prefix_ = full_name + "." + std::to_string(index) + ".";
                             field.at(index).describe(list);
                             return list;
                           },
                       .with_blank =
                           [full_name](const std::function<void(const OptionList&)>& read) {
                             T blank;
                             OptionList list;
                             list.prefix_ = full_name + ".N.";
                             blank.describe(list);
                             read(list);
                           }});
  }

  void add(std::string_view name, std::string_view sentence, OptionTraits traits, ValueType type, ValueCount count,
           std::function<Scalars()> get, std::function<void(const Scalars&)> set) {
    auto initial = get();
    options_.push_back({prefix_ + std::string(name), sentence, std::move(traits), type, count, std::move(initial),
                        std::move(get), std::move(set)});
  }

  std::string prefix_;
  std::vector<Option> options_;
  std::vector<OptionSection> sections_;
  std::vector<OptionTables> tables_;
};

}  // namespace sluice
