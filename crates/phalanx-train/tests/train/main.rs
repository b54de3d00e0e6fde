//! Parts of training among several ranks, against one rank and against values worked out by hand.

mod compress;
mod elastic;
mod expert;
mod outer;
mod pipeline;
mod sharding;
