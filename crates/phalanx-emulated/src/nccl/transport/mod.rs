//! Messages between ranks, in one process or in several: the same way for all.
//!
//! Each process listens at an abstract Unix socket. A process connects once to each process that it sends to.
//! A thread for each connection puts arriving messages into the mailboxes of the ranks. Sending never waits.
//! The ranks of a communicator first go to the process that made their unique id (the root), which tells them
//! the addresses of all.
//!
//! From the top down, each file uses files further down only:
//!
//! | File | What it has |
//! |---|---|
//! | `join.rs` | unique ids, and how a rank gets the addresses of the others |
//! | `endpoint.rs` | this process's socket, its connections, and its ranks' mailboxes |
//! | `root.rs` | the root of a unique id: collects its ranks |
//! | `mailbox.rs` | the messages, signals and windows of a rank |
//! | `message.rs` | a message and its encoding |

pub mod endpoint;
pub mod join;
pub mod mailbox;
pub mod message;
pub mod root;
