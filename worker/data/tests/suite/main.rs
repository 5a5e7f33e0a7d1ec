//! Data sets whose cameras are videos, in both layouts: `make_fixtures.py` wrote all but the videos.

mod frames;
mod refused;
mod sets;
