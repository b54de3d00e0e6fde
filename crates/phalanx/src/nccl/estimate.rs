//! Estimates of an operation's time by the library's cost model (`ncclGroupSimulateEnd`).

use super::surface::Surface;
use crate::api::group::{CommGroup, Group};
use crate::backend::nccl::collective::Needs;
use crate::backend::nccl::{check_on_device, group, operation};
use crate::contract::{Call, Operation};
use crate::types::error::{Error, Result, UnsupportedError};
use phalanx_sys::nccl::{ncclResult_t, ncclSimInfo_t};
use std::time::Duration;

impl<'a> Surface<'a> {
    /// Estimates the time of a collective by the library's cost model (`ncclGroupSimulateEnd`, 2.22); `None`
    /// if the model has no figure. Nothing is enqueued, and the buffers do not change. Collective: all ranks
    /// ask for the same, since the library connects them for it.
    ///
    /// The library chooses algorithms by this model, which assumes an idle machine. It covers `all_reduce`,
    /// `broadcast`, `reduce`, `all_gather` and `reduce_scatter` in GPU memory.
    ///
    /// ```no_run
    /// # fn main() -> phalanx::Result<()> {
    /// # let comm = phalanx::init()?;
    /// let nccl = comm.nccl().expect("NCCL");
    /// let mut gradients = nccl.alloc::<f32>(1 << 20)?;
    /// let time = nccl.estimate(|g| g.all_reduce_in_place(&mut gradients, phalanx::ReduceOp::Sum))?;
    /// println!("{time:?}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::MissingFunction`](crate::Error) if the library is too old for it;
    /// [`Error::Unsupported`](crate::Error) for anything but one of these collectives, and on a communicator
    /// that is [non-blocking](crate::nccl::Config::non_blocking), whose operations the library would carry
    /// out instead; [`UsageError::Memory`](crate::UsageError) for host memory.
    pub fn estimate(
        &self,
        describe: impl FnOnce(&mut CommGroup<'_, 'a>) -> Result<()>,
    ) -> Result<Option<Duration>> {
        let communicator = &self.comm.communicator;
        let name = "ncclGroupSimulateEnd";
        let simulate = communicator.library.need(communicator.library.ncclGroupSimulateEnd, name)?;
        let mut group = Group::new();
        describe(&mut group.on(self.front))?;
        let call = the_collective(&group)?;
        check_on_device(
            &call.spaces,
            "GPU memory, as the library's estimate is for",
            "describe the operation with slices of the GPU",
        )?;
        self.check_blocking()?;
        self.comm.refuse_driver("estimate")?;
        if communicator.ranks == 1 {
            // For one rank, the library works during the call and not at the group's end.
            return Ok(None);
        }
        // SAFETY: the buffers are lent to the group; one thread at a time makes collective calls.
        unsafe { self.prepare_collective(call) }?;
        let (mut info, mut answer) = (ncclSimInfo_t::new(), ncclResult_t::Success);
        group::start(communicator, &self.comm.messages);
        // The library's model is of the library, also where an own kernel would carry the call out.
        // SAFETY: as above, until the group's end, behind which the library has forgotten them.
        let queued = unsafe { operation::collective_with(communicator, call, None, Needs::default()) };
        let ended = group::end_with(communicator, name, &queued, || {
            // SAFETY: the level was entered on this thread; the out-pointer is written during the call.
            answer = unsafe { simulate(&raw mut info) };
            answer
        });
        queued.and(ended)?;
        if answer == ncclResult_t::InProgress {
            return Err(carries_out(
                "it is non-blocking (by a configuration file of NCCL's), and did so now",
            ));
        }
        // In microseconds; negative if the model has no figure.
        let seconds = f64::from(info.estimatedTime) / 1e6;
        Ok(Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero()))
    }

    fn check_blocking(&self) -> Result<()> {
        if std::env::var("NCCL_COMM_BLOCKING").is_ok_and(|value| value == "0") {
            return Err(carries_out("it is non-blocking (NCCL_COMM_BLOCKING=0)"));
        }
        // The environment variable takes precedence.
        if self.comm.settings.config.non_blocking && std::env::var_os("NCCL_COMM_BLOCKING").is_none() {
            return Err(carries_out("it is non-blocking (Config::non_blocking)"));
        }
        Ok(())
    }
}

/// On a non-blocking communicator the library forgets that the group was only to be simulated.
fn carries_out(why: &str) -> Error {
    Error::from(UnsupportedError {
        what: "an estimate on this communicator".into(),
        why: format!("{why}: the library would carry the operation out"),
        remedy: "ask a communicator that blocks".into(),
    })
}

/// The one operation that was described.
fn the_collective<'g>(group: &'g Group<'_>) -> Result<&'g Call<'g>> {
    use Operation::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
    let mut calls = group.calls();
    let (call, more) = (calls.next(), calls.next());
    let described = match (call, more, group.transfers().next()) {
        (Some(call), None, None) => {
            if matches!(call.operation, AllReduce | Broadcast | Reduce | AllGather | ReduceScatter) {
                return Ok(call);
            }
            call.operation.name()
        }
        (None, None, None) => "nothing",
        (None, None, Some(_)) => "messages",
        _ => "several operations",
    };
    Err(Error::from(UnsupportedError {
        what: format!("an estimate of {described}"),
        why: "the library's model has one collective at a time: all_reduce, broadcast, reduce, all_gather or reduce_scatter"
            .into(),
        remedy: "describe one of these in each estimate".into(),
    }))
}
