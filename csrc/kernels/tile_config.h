// What LDTILECFG reads: the shape of each of the eight tile registers. Palette 1: up to 16 rows of up to 64 bytes.
#pragma once
#include <stdint.h>

namespace {

constexpr int kTiles = 8;
constexpr int kTile = 16;  // rows of a tile, and words of one of its rows

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "the format is Intel's");

}  // namespace
