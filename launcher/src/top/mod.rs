//! `cox top`: runs on a full screen.
//!
//! ```text
//! coordinator, files ──▶ follow ──▶ RunView (what is known of a run)  ──▶ draw ──▶ terminal
//! keys ───────────────▶ app (which run, which rank, what is asked) ─────────┘
//!                        └──▶ orders, back to follow
//! ```
//!
//! State and drawing know neither a clock nor a terminal. Nothing here is asked of a worker, and of a
//! coordinator no more than what `cox watch` and `cox status` ask.

pub mod app;
mod charts;
pub mod draw;
mod files;
pub mod follow;
mod rank_table;
pub mod theme;
