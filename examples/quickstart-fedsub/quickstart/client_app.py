"""The client: trains and tests the model that it is sent."""

from flwr.app import Context

import fedsub
from quickstart.task import Net, load_data


def data_of(context: Context):
    return load_data(context.node_config["partition-id"], context.node_config["num-partitions"])


app = fedsub.client_app(model=Net, data=data_of)
