// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "sluice/config/app.h"
#include "sluice/config/values.h"

namespace sluice {
namespace {

// Words that follow `sluice NAME`: every option, and --no-... for those that are on.
std::vector<std::string> option_words(const OptionList& list) {
  std::vector<std::string> words{"--help"};
  for (const auto& option : list.options()) {
    words.push_back(flag_of(option));
    if (option.initial == Scalars{true}) words.push_back("--no-" + option.name);
    if (!option.traits.alias.empty()) words.push_back(fmt::format("--{}", option.traits.alias));
  }
  for (const auto& tables : list.tables()) {
    tables.with_blank([&](const OptionList& blank) {
      const auto placeholder = tables.name.size() + 1;  // "N" of "data.sources.N.path"
      for (const auto& option : blank.options()) {
        words.push_back("--" + std::string(option.name).replace(placeholder, 1, "0"));
      }
    });
  }
  return words;
}

// A case of `$previous` for each option whose values are known.
std::string value_cases(const OptionList& list) {
  std::string cases;
  for (const auto& option : list.options()) {
    if (option.traits.choices.empty()) continue;
    cases += fmt::format("        {}) words=\"{}\" ;;\n", flag_of(option), fmt::join(option.traits.choices, " "));
  }
  return cases;
}

}  // namespace

std::string bash_completion(const Program& program) {
  std::vector<std::string_view> names;
  std::string commands;
  for (const auto& command : program.commands) {
    const auto bound = command.bind();
    names.push_back(command.name);
    commands +=
        fmt::format("    {})\n      words=\"{}\"\n      case \"$previous\" in\n{}        *) ;;\n      esac ;;\n",
                    command.name, fmt::join(option_words(bound->list()), " "), value_cases(bound->list()));
  }
  return fmt::format(R"(# bash completion of sluice; load it with: source <(sluice completion bash)
_sluice() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{} completion --help --version" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{}    completion) words="bash" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _sluice sluice
)",
                     fmt::join(names, " "), commands);
}

}  // namespace sluice
