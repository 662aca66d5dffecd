"""What each error becomes for a client over gRPC."""

import grpc
import pytest

from base.errors import LeaseExpiredError, LostError, StaleError, TransferFailedError, status_of


@pytest.mark.parametrize("lost", [LostError, LeaseExpiredError, StaleError, TransferFailedError])
def test_work_that_was_lost_is_unavailable_to_a_grpc_client_whatever_lost_it(lost):
    assert status_of(lost("gone")) is grpc.StatusCode.UNAVAILABLE
