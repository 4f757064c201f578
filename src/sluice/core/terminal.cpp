// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace sluice {
namespace {

constexpr std::size_t kUnknownWidth = 80;

struct Screen {
  std::mutex mutex;
  std::string live;  // empty: there is none
};

Screen& screen() {
  static Screen instance;
  return instance;
}

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

std::size_t columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUnknownWidth;
}

// The first `width` characters of UTF-8 text.
std::string_view cut(std::string_view text, std::size_t width) {
  std::size_t characters = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool starts_character = (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80;
    if (starts_character && characters++ == width) return text.substr(0, i);
  }
  return text;
}

void write(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

// One column stays free: a full line would make some terminals go to the next.
void draw(std::string_view text) { write(fmt::format("\r{}\x1b[K", cut(text, columns() - 1))); }

}  // namespace

bool on_terminal(int descriptor) { return ::isatty(descriptor) == 1 && environment("TERM") != "dumb"; }

bool colours_wanted(int descriptor) { return on_terminal(descriptor) && environment("NO_COLOR").empty(); }

void show_live_line(std::string_view text) {
  if (!on_terminal()) return;
  const std::lock_guard lock(screen().mutex);
  screen().live = text;
  draw(text);
}

void keep_live_line() {
  const std::lock_guard lock(screen().mutex);
  if (!screen().live.empty()) write("\n");
  screen().live.clear();
}

LinesAboveLiveLine::LinesAboveLiveLine() : lock_(screen().mutex) {
  if (!screen().live.empty()) write("\r\x1b[K");
}

LinesAboveLiveLine::~LinesAboveLiveLine() {
  if (!screen().live.empty()) draw(screen().live);
}

}  // namespace sluice
