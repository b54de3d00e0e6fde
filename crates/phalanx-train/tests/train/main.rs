//! Parts of training among several ranks, against one rank and against values worked out by hand.

mod expert;
mod sharding;
