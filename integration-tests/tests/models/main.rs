//! Models, adapters and policies against the implementations that people compare with, on the CPU: one
//! program, because each would compile every model again.

mod adapter;
mod bad_input;
mod chats;
mod expert;
mod geometry;
mod layerwise;
mod model;
mod trajectory;
